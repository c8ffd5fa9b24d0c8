"""The four services of this process: messages in, moves of the ledger, messages out."""

import json
from typing import Any

import grpc

from nexrl.errors import InvalidArgumentError, NotFoundError
from nexrl.v1 import data_loader_service_pb2 as loader_pb
from nexrl.v1 import packed_pb2 as packed_pb
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1 import validator_service_pb2 as validator_pb
from nexrl.v1.data_loader_service_pb2_grpc import DataLoaderServiceServicer
from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceServicer
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceServicer
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceServicer
from nexrl_trajectory_pool.audit import Audit
from nexrl_trajectory_pool.ledger import GrantedBatch, SampleRecord
from nexrl_trajectory_pool.pool import Lease, Pool
from nexrl_trajectory_pool.results import produced_samples
from nexrl_trajectory_pool.validation import validation_metrics

MAX_FINDINGS = 1000
DEFAULT_PAGE = 1000
MAX_PAGE = 10_000

OUTCOMES = {name.removeprefix("PUT_OUTCOME_"): value for name, value in pb.PutOutcome.items()}
"""By the ledger's name of each."""

WAITING = ("open", "leased", "grouping", "ready")
"""States of samples that are in no batch yet."""

Context = grpc.aio.ServicerContext[Any, Any]


class Pools:
    """The pools of an experiment, by model tag."""

    def __init__(self, pools: dict[str, Pool]) -> None:
        self._pools = pools

    def __getitem__(self, tag: str) -> Pool:
        if tag not in self._pools:
            raise NotFoundError(f"model_tag: {tag!r}; this experiment trains {sorted(self._pools)}")
        return self._pools[tag]

    def all(self) -> list[Pool]:
        """Every pool."""
        return list(self._pools.values())

    def named(self, tag: str) -> list[Pool]:
        """The pool of `tag`; every pool when it is empty."""
        return [self[tag]] if tag else self.all()


class DataLoaderServicer(DataLoaderServiceServicer):
    """nexrl.v1.DataLoaderService."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def LeaseTasks(self, request: loader_pb.LeaseTasksRequest, context: Context) -> loader_pb.LeaseTasksResponse:
        if request.max_samples < 1:
            raise InvalidArgumentError(f"max_samples: {request.max_samples}; at least 1")
        pool = self._pools[request.model_tag]
        leased = await pool.lease_tasks(
            request.request_id, request.max_samples, request.lease_seconds, request.wait_seconds
        )
        return loader_pb.LeaseTasksResponse(
            leases=[_task_lease(pool, lease, leased.deadline) for lease in leased.leases],
            exhausted=leased.exhausted,
            waiting_on=leased.waiting_on,
        )

    async def RenewLeases(
        self, request: loader_pb.RenewLeasesRequest, context: Context
    ) -> loader_pb.RenewLeasesResponse:
        pool = self._pools[request.model_tag]
        seconds = pool.lease_seconds(request.lease_seconds)
        ledger = pool.ledger(_is_validation(request.purpose))
        return loader_pb.RenewLeasesResponse(
            lost_sample_ids=await ledger.renew([(s.sample_id, s.attempt) for s in request.samples], seconds)
        )

    async def ReturnSamples(
        self, request: loader_pb.ReturnSamplesRequest, context: Context
    ) -> loader_pb.ReturnSamplesResponse:
        ledger = self._pools[request.model_tag].ledger(_is_validation(request.purpose))
        samples = [(s.sample_id, s.attempt) for s in request.samples]
        return loader_pb.ReturnSamplesResponse(returned=await ledger.return_samples(request.request_id, samples))

    async def AddTask(self, request: loader_pb.AddTaskRequest, context: Context) -> loader_pb.AddTaskResponse:
        ledger = self._pools[request.model_tag].training
        is_front = request.position == loader_pb.TASK_POSITION_FRONT
        await ledger.add_task(request.request_id, added_item(request.task), front=is_front)
        return loader_pb.AddTaskResponse()

    async def GetTask(self, request: loader_pb.GetTaskRequest, context: Context) -> loader_pb.GetTaskResponse:
        source = self._pools[request.model_tag].source(_is_validation(request.purpose))
        if not 0 <= request.index < len(source):
            raise NotFoundError(f"index: {request.index}; 0 to {len(source) - 1}")
        return loader_pb.GetTaskResponse(task=_task(source.tasks[request.index]))

    async def ResetDataLoader(
        self, request: loader_pb.ResetDataLoaderRequest, context: Context
    ) -> loader_pb.ResetDataLoaderResponse:
        await self._pools[request.model_tag].ledger(_is_validation(request.purpose)).reset(request.request_id)
        return loader_pb.ResetDataLoaderResponse()

    async def GetDataLoaderState(
        self, request: loader_pb.GetDataLoaderStateRequest, context: Context
    ) -> loader_pb.GetDataLoaderStateResponse:
        pool = self._pools[request.model_tag]
        is_validation = _is_validation(request.purpose)
        source, ledger = pool.source(is_validation), pool.ledger(is_validation)
        state = await ledger.state()
        remaining = -1 if source.total is None else source.total - state["cursor"] + state.added_tasks
        return loader_pb.GetDataLoaderStateResponse(
            items=len(source),
            cursor=state["cursor"],
            remaining=remaining,
            finished=state.exhausted,
            can_lease=state.can_lease,
        )


class TrajectoryPoolServicer(TrajectoryPoolServiceServicer):
    """nexrl.v1.TrajectoryPoolService."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def PutSamples(  # type: ignore[override]  # the same bytes, see packed.proto
        self, request: packed_pb.PackedPutSamplesRequest, context: Context
    ) -> pool_pb.PutSamplesResponse:
        pool = self._pools[request.model_tag]
        results = produced_samples(request.results, pool.spec.trajectory_pool.key_list, pool.vocabulary_size)
        outcomes = await pool.training.put_samples(request.request_id, results)
        return pool_pb.PutSamplesResponse(outcomes=map(OUTCOMES.__getitem__, outcomes))

    async def LeaseBatch(  # type: ignore[override]  # the same bytes, see packed.proto
        self, request: pool_pb.LeaseBatchRequest, context: Context
    ) -> packed_pb.PackedLeaseBatchResponse:
        pool = self._pools[request.model_tag] if request.model_tag else self._pools.all()[0]
        batch, exhausted = await pool.lease_batch(
            request.request_id, request.batch_size, request.lease_seconds, request.wait_seconds, request.worker_id
        )
        return _lease_batch_response(pool.tag, batch, exhausted)

    async def ReturnBatch(self, request: pool_pb.ReturnBatchRequest, context: Context) -> pool_pb.ReturnBatchResponse:
        ledger = self._pools[request.model_tag].training
        await ledger.return_batch(request.request_id, request.batch_id, request.attempt)
        return pool_pb.ReturnBatchResponse()

    async def SetPolicyVersion(
        self, request: pool_pb.SetPolicyVersionRequest, context: Context
    ) -> pool_pb.SetPolicyVersionResponse:
        version = await self._pools[request.model_tag].training.set_version(request.policy_version)
        return pool_pb.SetPolicyVersionResponse(policy_version=version)

    async def GetTrajectoryPoolState(
        self, request: pool_pb.GetTrajectoryPoolStateRequest, context: Context
    ) -> pool_pb.GetTrajectoryPoolStateResponse:
        pools = self._pools.named(request.model_tag)
        return pool_pb.GetTrajectoryPoolStateResponse(pools=[await pool_state(pool) for pool in pools])

    async def AuditLedger(self, request: pool_pb.AuditLedgerRequest, context: Context) -> pool_pb.AuditLedgerResponse:
        audits = [_audit(pool.tag, await pool.training.audit()) for pool in self._pools.named(request.model_tag)]
        return pool_pb.AuditLedgerResponse(audits=audits)

    async def GetSample(self, request: pool_pb.GetSampleRequest, context: Context) -> pool_pb.GetSampleResponse:
        record, payload = await self._pools[request.model_tag].training.sample(request.sample_id)
        result = None if payload is None else pb.SampleResult.FromString(payload)
        return pool_pb.GetSampleResponse(record=_sample_record(record), result=result)

    async def ListSamples(self, request: pool_pb.ListSamplesRequest, context: Context) -> pool_pb.ListSamplesResponse:
        first_group = _page(request.page_token)
        if not 0 <= request.page_size <= MAX_PAGE:
            raise InvalidArgumentError(f"page_size: {request.page_size}; 0 to {MAX_PAGE}, 0 for {DEFAULT_PAGE}")
        ledger = self._pools[request.model_tag].training
        records, following = await ledger.samples(first_group, request.page_size or DEFAULT_PAGE)
        token = "" if following is None else str(following)
        return pool_pb.ListSamplesResponse(records=map(_sample_record, records), next_page_token=token)


class TrainBatchPoolServicer(TrainBatchPoolServiceServicer):
    """nexrl.v1.TrainBatchPoolService."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def PutTrainBatch(
        self, request: train_pb.PutTrainBatchRequest, context: Context
    ) -> train_pb.PutTrainBatchResponse:
        batch, put_id = request.train_batch, request.request_id
        batch.put_id = put_id
        ledger = self._pools[batch.model_tag].training
        payload = batch.SerializeToString()
        await ledger.put_train_batch(
            request.request_id, batch.batch_id, request.batch_attempt, batch.sample_ids, payload, put_id
        )
        return train_pb.PutTrainBatchResponse()

    async def LeaseTrainBatch(
        self, request: train_pb.LeaseTrainBatchRequest, context: Context
    ) -> train_pb.LeaseTrainBatchResponse:
        pool = self._pools[request.model_tag]
        payload, exhausted = await pool.lease_train_batch(request.step, request.incarnation, request.wait_seconds)
        batch = None if payload is None else train_pb.TrainBatch.FromString(payload)
        return train_pb.LeaseTrainBatchResponse(train_batch=batch, exhausted=exhausted)

    async def AckTrainBatch(
        self, request: train_pb.AckTrainBatchRequest, context: Context
    ) -> train_pb.AckTrainBatchResponse:
        is_wanted = await self._pools[request.model_tag].training.ack_train_batch(
            request.step, request.incarnation, request.sample_ids, request.put_id
        )
        return train_pb.AckTrainBatchResponse(checkpoint_wanted=is_wanted)

    async def CommitCheckpoint(
        self, request: train_pb.CommitCheckpointRequest, context: Context
    ) -> train_pb.CommitCheckpointResponse:
        await self._pools[request.model_tag].training.commit_checkpoint(request.steps, request.incarnation)
        return train_pb.CommitCheckpointResponse()

    async def ResumeFromCheckpoint(
        self, request: train_pb.ResumeFromCheckpointRequest, context: Context
    ) -> train_pb.ResumeFromCheckpointResponse:
        ledger = self._pools[request.model_tag].training
        incarnation, replayed = await ledger.resume(request.request_id, request.steps, request.data_cursor)
        return train_pb.ResumeFromCheckpointResponse(incarnation=incarnation, replayed_steps=replayed)

    async def GetTrainBatchPoolState(
        self, request: train_pb.GetTrainBatchPoolStateRequest, context: Context
    ) -> train_pb.GetTrainBatchPoolStateResponse:
        state = await self._pools[request.model_tag].training.state()
        return train_pb.GetTrainBatchPoolStateResponse(
            queued=state.queued_train_batches, trained=state["kept"], durable_steps=state["durable_steps"]
        )


class ValidatorServicer(ValidatorServiceServicer):
    """nexrl.v1.ValidatorService."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def StartValidation(
        self, request: validator_pb.StartValidationRequest, context: Context
    ) -> validator_pb.StartValidationResponse:
        samples = await self._pools[request.model_tag].start_validation(request.policy_version)
        return validator_pb.StartValidationResponse(samples=samples)

    async def PutValidationSamples(  # type: ignore[override]  # the same bytes, see packed.proto
        self, request: packed_pb.PackedPutSamplesRequest, context: Context
    ) -> validator_pb.PutValidationSamplesResponse:
        ledger = self._pools[request.model_tag].validation
        outcomes = await ledger.put_samples(request.request_id, produced_samples(request.results, None))
        return validator_pb.PutValidationSamplesResponse(outcomes=map(OUTCOMES.__getitem__, outcomes))

    async def WaitValidation(
        self, request: validator_pb.WaitValidationRequest, context: Context
    ) -> validator_pb.WaitValidationResponse:
        pool = self._pools[request.model_tag]
        complete, payloads, failed = await pool.wait_validation(request.policy_version, request.wait_seconds)
        metrics = validation_metrics(payloads, failed) if complete else {}
        return validator_pb.WaitValidationResponse(complete=complete, metrics=metrics)

    async def EndValidation(
        self, request: validator_pb.EndValidationRequest, context: Context
    ) -> validator_pb.EndValidationResponse:
        await self._pools[request.model_tag].end_validation(request.policy_version)
        return validator_pb.EndValidationResponse()


def serve_packed(server: grpc.aio.Server, pool: TrajectoryPoolServicer, validator: ValidatorServicer) -> None:
    """Serve the calls that carry trajectories, which stay the bytes that they are.

    To be called after the generated functions, whose handlers of these methods it replaces.
    """
    put = grpc.unary_unary_rpc_method_handler(
        pool.PutSamples, packed_pb.PackedPutSamplesRequest.FromString, pool_pb.PutSamplesResponse.SerializeToString
    )
    lease = grpc.unary_unary_rpc_method_handler(
        pool.LeaseBatch, pool_pb.LeaseBatchRequest.FromString, packed_pb.PackedLeaseBatchResponse.SerializeToString
    )
    put_validation = grpc.unary_unary_rpc_method_handler(
        validator.PutValidationSamples,
        packed_pb.PackedPutSamplesRequest.FromString,
        validator_pb.PutValidationSamplesResponse.SerializeToString,
    )
    server.add_registered_method_handlers("nexrl.v1.TrajectoryPoolService", {"PutSamples": put, "LeaseBatch": lease})
    server.add_registered_method_handlers("nexrl.v1.ValidatorService", {"PutValidationSamples": put_validation})


async def pool_state(pool: Pool) -> pool_pb.PoolState:
    """The training ledger's counters as a message."""
    state = await pool.training.state()
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
    )


def _audit(tag: str, audit: Audit) -> pool_pb.LedgerAudit:
    findings = [pool_pb.AuditFinding(subject=f.subject, problem=f.problem) for f in audit.findings[:MAX_FINDINGS]]
    return pool_pb.LedgerAudit(
        model_tag=tag,
        samples=audit.samples,
        dropped=audit.dropped,
        findings=findings,
        findings_total=len(audit.findings),
    )


def _sample_record(record: SampleRecord) -> pool_pb.SampleRecord:
    return pool_pb.SampleRecord(
        sample_id=record.sample_id,
        state=pool_pb.SampleState.Value(f"SAMPLE_STATE_{record.state.upper()}"),
        attempt=record.attempt,
        batch_id=record.batch,
        drop_reason=record.drop_reason,
    )


def _page(token: str) -> int:
    if token and not token.isdecimal():
        raise InvalidArgumentError(f"page_token: {token!r}; next_page_token of the page before, or empty")
    return int(token or 0)


def added_item(task: pb.Task) -> bytes:
    """The item of a task that was added by hand, as tasks of the data set have it. Raises InvalidArgumentError."""
    try:
        item = json.loads(task.item_json)
    except ValueError as error:
        raise InvalidArgumentError(f"task.item_json: not JSON: {error}") from None
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str) or not item["prompt"]:
        raise InvalidArgumentError("task.item_json: an object with the text 'prompt' is needed")
    if not task.task_id:
        raise InvalidArgumentError("task.task_id: empty")
    return json.dumps({"answer": None, "metadata": {}, **item, "id": task.task_id}).encode()


def _is_validation(purpose: "pb.Purpose.ValueType") -> bool:
    return purpose == pb.PURPOSE_VALIDATION


def _task(task: Any) -> pb.Task:
    return pb.Task(task_id=str(task["id"]), item_json=json.dumps(task))


def _task_lease(pool: Pool, lease: Lease, deadline: float) -> pb.TaskLease:
    validation = pool.spec.validation
    is_validation = lease.is_validation and validation is not None
    return pb.TaskLease(
        task=pb.Task(task_id=lease.task_id, item_json=lease.item_json),
        group_id=lease.granted.group,
        samples=[pb.SampleLease(sample_id=sample, attempt=attempt) for sample, attempt in lease.granted.samples],
        purpose=pb.PURPOSE_VALIDATION if is_validation else pb.PURPOSE_TRAINING,
        deadline_unix_seconds=deadline,
        temperature=validation.temperature if is_validation and validation else pool.spec.rollout.temperature,
    )


def _lease_batch_response(tag: str, batch: GrantedBatch | None, exhausted: bool) -> packed_pb.PackedLeaseBatchResponse:
    response = packed_pb.PackedLeaseBatchResponse(exhausted=exhausted)
    if batch is not None:
        lease = response.lease
        lease.batch_id, lease.attempt, lease.model_tag = batch.batch, batch.attempt, tag
        lease.data_cursor = batch.data_cursor
        for name, payloads in batch.groups:  # filled in place: a message given to another is copied
            lease.groups.add(group_id=name).samples.extend(payloads)
    return response
