"""Messages of the four services, made from what the ledger and the pools return."""

import json

from nexrl.errors import InvalidArgumentError
from nexrl.sample_states import IN_FLIGHT
from nexrl.v1 import packed_pb2 as packed_pb
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl_trajectory_pool.ledger import FailedAttempt, GrantedBatch, SampleRecord
from nexrl_trajectory_pool.ledger.audit import Audit
from nexrl_trajectory_pool.pool import Lease, Pool

MAX_FINDINGS = 1000

WAITING = tuple(state for state in IN_FLIGHT if state != "batched")
"""States of samples that are in no batch yet."""


async def pool_state(pool: Pool, *, is_validation: bool) -> pool_pb.PoolState:
    """Return the counters of one purpose's ledger as a message."""
    state = await pool.ledger(is_validation).state()
    return pool_pb.PoolState(
        model_tag=pool.tag,
        empty=sum(state[name] for name in WAITING) + state.unprocessed_batches == 0,
        credit=state.credit,
        dropped=state.dropped,
        imbalance=state.imbalance,
        policy_version=state["version"],
        next_batch_id=state["next_batch"],
        granted=state["granted"],
        open=state["open"],
        leased=state["leased"],
        grouping=state["grouping"],
        ready=state["ready"],
        batched=state["batched"],
        trained=state["trained"],
        durable=state["durable"],
        finished_attempts=state["finished_attempts"],
        failed_attempts=state["failed_attempts"],
        last_failed_attempt=failed_attempt_message(state.last_failure) if state.last_failure else None,
    )


def failed_attempt_message(failure: FailedAttempt) -> pool_pb.FailedAttempt:
    """Return a failed attempt as a message."""
    return pool_pb.FailedAttempt(
        sample_id=failure.sample,
        worker_id=failure.worker,
        verdict=pb.Verdict.Value(f"VERDICT_{failure.verdict.upper()}"),
        error=failure.error,
    )


def audit_message(tag: str, audit: Audit) -> pool_pb.LedgerAudit:
    """Return an audit as a message, with at most MAX_FINDINGS findings."""
    findings = [pool_pb.AuditFinding(subject=f.subject, problem=f.problem) for f in audit.findings[:MAX_FINDINGS]]
    return pool_pb.LedgerAudit(
        model_tag=tag,
        samples=audit.samples,
        dropped=audit.dropped,
        findings=findings,
        findings_total=len(audit.findings),
    )


def sample_record_message(record: SampleRecord) -> pool_pb.SampleRecord:
    """Return where a sample is as a message."""
    return pool_pb.SampleRecord(
        sample_id=record.sample_id,
        state=pool_pb.SampleState.Value(f"SAMPLE_STATE_{record.state.upper()}"),
        attempt=record.attempt,
        batch_id=record.batch,
        drop_reason=record.drop_reason,
    )


def added_item(task: pb.Task) -> bytes:
    """Return the item of a task that was added by hand, in the form of the data set. Raises InvalidArgumentError."""
    try:
        item = json.loads(task.item_json)
    except ValueError as error:
        raise InvalidArgumentError(f"task.item_json: not JSON: {error}") from None
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str) or not item["prompt"]:
        raise InvalidArgumentError("task.item_json: must be an object with the text 'prompt'")
    if not task.task_id:
        raise InvalidArgumentError("task.task_id: empty")
    return json.dumps({"answer": None, "metadata": {}, **item, "id": task.task_id}).encode()


def task_lease_message(pool: Pool, lease: Lease, deadline: float) -> pb.TaskLease:
    """Return a granted task as a message."""
    validation = pool.spec.validation
    is_validation = lease.is_validation and validation is not None
    return pb.TaskLease(
        task=pb.Task(task_id=lease.task_id, item_json=lease.item_json),
        group_id=lease.granted.task,
        samples=[pb.SampleLease(sample_id=sample, attempt=attempt) for sample, attempt in lease.granted.samples],
        purpose=pb.PURPOSE_VALIDATION if is_validation else pb.PURPOSE_TRAINING,
        deadline_unix_seconds=deadline,
        temperature=validation.temperature if is_validation and validation else pool.spec.rollout.temperature,
        top_p=pool.spec.rollout.top_p,
        top_k=pool.spec.rollout.top_k,
        stop=pool.spec.rollout.stop,
    )


def lease_batch_response(tag: str, batch: GrantedBatch | None, exhausted: bool) -> packed_pb.PackedLeaseBatchResponse:
    """Return a granted batch, or none, as a message."""
    response = packed_pb.PackedLeaseBatchResponse(exhausted=exhausted)
    if batch is not None:
        lease = response.lease
        lease.batch_id, lease.attempt, lease.model_tag = batch.batch, batch.attempt, tag
        lease.data_cursor, lease.refilled_groups = batch.data_cursor, batch.refilled_groups
        for name, payloads in batch.groups:  # filled in place: assigning a message copies it
            lease.groups.add(group_id=name).samples.extend(payloads)
    return response


def emptied_train_batch(payload: bytes, put_id: str) -> bytes:
    """Return a train batch without its sequences: it trains nothing, and keeps its number and samples."""
    batch = train_pb.TrainBatch.FromString(payload)
    batch.put_id = put_id
    batch.dropped = True
    for tensor in batch.tensors.values():
        tensor.shape[0] = 0
        tensor.content = b""
    return batch.SerializeToString()
