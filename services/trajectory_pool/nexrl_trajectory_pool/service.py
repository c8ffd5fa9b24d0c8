"""The four services of this process: they turn messages into moves of the ledger, and answers into messages."""

import asyncio
import logging
from functools import partial
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
from nexrl_trajectory_pool.messages import (
    added_item,
    audit_message,
    emptied_train_batch,
    lease_batch_response,
    pool_state,
    sample_record_message,
    task_lease_message,
)
from nexrl_trajectory_pool.pool import Pool
from nexrl_trajectory_pool.results import produced_samples
from nexrl_trajectory_pool.train_batch_check import check_train_batch
from nexrl_trajectory_pool.validation import validation_metrics

log = logging.getLogger(__name__)

MAX_SAMPLES = 4096
"""Most samples of one LeaseTasks call: Redis serves nobody else while it grants them."""
MAX_COUNT = 2**53
"""Redis counts with the numbers of Lua, which are exact up to this."""
DEFAULT_PAGE = 1000
MAX_PAGE = 10_000

OUTCOMES = {name.removeprefix("PUT_OUTCOME_"): value for name, value in pb.PutOutcome.items()}
"""By the ledger's name of each."""

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
        """Return every pool."""
        return list(self._pools.values())

    def named(self, tag: str) -> list[Pool]:
        """Return the pool of `tag`; every pool when it is empty."""
        return [self[tag]] if tag else self.all()


class DataLoaderServicer(DataLoaderServiceServicer):
    """nexrl.v1.DataLoaderService."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def LeaseTasks(self, request: loader_pb.LeaseTasksRequest, context: Context) -> loader_pb.LeaseTasksResponse:
        if not 1 <= request.max_samples <= MAX_SAMPLES:
            raise InvalidArgumentError(f"max_samples: {request.max_samples}; 1 to {MAX_SAMPLES}")
        pool = self._pools[request.model_tag]
        leased = await pool.lease_tasks(
            request.request_id, request.max_samples, request.lease_seconds, request.wait_seconds
        )
        return loader_pb.LeaseTasksResponse(
            leases=[task_lease_message(pool, lease, leased.deadline) for lease in leased.leases],
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
        if not 0 <= request.index < source.items:
            raise NotFoundError(f"index: {request.index}; 0 to {source.items - 1}")
        return loader_pb.GetTaskResponse(task=await source.task_in_source_order(request.index))

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
            items=source.items,
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
        results = produced_samples(
            request.results,
            pool.spec.trajectory_pool.key_list,
            pool.vocabulary_size,
            pool.sampling,
            pool.spec.max_sequence_tokens,
        )
        outcomes = await pool.training.put_samples(request.request_id, results, request.worker_id)
        return pool_pb.PutSamplesResponse(outcomes=map(OUTCOMES.__getitem__, outcomes))

    async def LeaseBatch(  # type: ignore[override]  # the same bytes, see packed.proto
        self, request: pool_pb.LeaseBatchRequest, context: Context
    ) -> packed_pb.PackedLeaseBatchResponse:
        pool = self._pools[request.model_tag] if request.model_tag else self._pools.all()[0]
        batch, exhausted = await pool.lease_batch(
            request.request_id, request.batch_size, request.lease_seconds, request.wait_seconds, request.worker_id
        )
        return lease_batch_response(pool.tag, batch, exhausted)

    async def ReturnBatch(self, request: pool_pb.ReturnBatchRequest, context: Context) -> pool_pb.ReturnBatchResponse:
        ledger = self._pools[request.model_tag].training
        await ledger.return_batch(request.request_id, request.batch_id, request.attempt)
        return pool_pb.ReturnBatchResponse()

    async def SetPolicyVersion(
        self, request: pool_pb.SetPolicyVersionRequest, context: Context
    ) -> pool_pb.SetPolicyVersionResponse:
        _require_count(policy_version=request.policy_version)
        version = await self._pools[request.model_tag].training.set_version(request.policy_version)
        return pool_pb.SetPolicyVersionResponse(policy_version=version)

    async def GetTrajectoryPoolState(
        self, request: pool_pb.GetTrajectoryPoolStateRequest, context: Context
    ) -> pool_pb.GetTrajectoryPoolStateResponse:
        pools, is_validation = self._pools.named(request.model_tag), _is_validation(request.purpose)
        return pool_pb.GetTrajectoryPoolStateResponse(
            pools=[await pool_state(pool, is_validation=is_validation) for pool in pools]
        )

    async def AuditLedger(self, request: pool_pb.AuditLedgerRequest, context: Context) -> pool_pb.AuditLedgerResponse:
        audits = [audit_message(pool.tag, await pool.training.audit()) for pool in self._pools.named(request.model_tag)]
        return pool_pb.AuditLedgerResponse(audits=audits)

    async def GetSample(self, request: pool_pb.GetSampleRequest, context: Context) -> pool_pb.GetSampleResponse:
        ledger = self._pools[request.model_tag].ledger(_is_validation(request.purpose))
        record, payload = await ledger.sample(request.sample_id)
        result = None if payload is None else pb.SampleResult.FromString(payload)
        return pool_pb.GetSampleResponse(record=sample_record_message(record), result=result)

    async def ListSamples(self, request: pool_pb.ListSamplesRequest, context: Context) -> pool_pb.ListSamplesResponse:
        first_group = _page(request.page_token)
        if not 0 <= request.page_size <= MAX_PAGE:
            raise InvalidArgumentError(f"page_size: {request.page_size}; 0 to {MAX_PAGE}, 0 for {DEFAULT_PAGE}")
        ledger = self._pools[request.model_tag].ledger(_is_validation(request.purpose))
        records, following = await ledger.samples(first_group, request.page_size or DEFAULT_PAGE)
        token = "" if following is None else str(following)
        return pool_pb.ListSamplesResponse(records=map(sample_record_message, records), next_page_token=token)


class TrainBatchPoolServicer(TrainBatchPoolServiceServicer):
    """nexrl.v1.TrainBatchPoolService."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def PutTrainBatch(
        self, request: train_pb.PutTrainBatchRequest, context: Context
    ) -> train_pb.PutTrainBatchResponse:
        batch, put_id = request.train_batch, request.request_id
        pool = self._pools[batch.model_tag]
        # In a thread: a large batch would keep all other calls waiting.
        algorithm, max_tokens = pool.spec.algorithm, pool.spec.max_sequence_tokens
        await asyncio.to_thread(check_train_batch, batch.tensors, pool.vocabulary_size, algorithm, max_tokens)
        batch.put_id, batch.dropped = put_id, False
        payload = batch.SerializeToString()
        await pool.training.put_train_batch(
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

    async def FailTrainBatch(
        self, request: train_pb.FailTrainBatchRequest, context: Context
    ) -> train_pb.FailTrainBatchResponse:
        ledger = self._pools[request.model_tag].training
        fail = partial(
            ledger.fail_train_batch,
            request.request_id,
            request.step,
            request.incarnation,
            request.sample_ids,
            request.put_id,
        )
        is_dropped = await fail(b"")
        if is_dropped is None:  # only now: the train batch may be large
            payload, _ = await ledger.lease_train_batch(request.step, request.incarnation)
            is_dropped = await fail(emptied_train_batch(payload or b"", request.request_id))
        if is_dropped:
            names = " ".join(request.sample_ids)
            log.error("step %d: its train batch has failed twice; dropped samples: %s", request.step, names)
        return train_pb.FailTrainBatchResponse(dropped=bool(is_dropped))

    async def CommitCheckpoint(
        self, request: train_pb.CommitCheckpointRequest, context: Context
    ) -> train_pb.CommitCheckpointResponse:
        await self._pools[request.model_tag].training.commit_checkpoint(request.steps, request.incarnation)
        return train_pb.CommitCheckpointResponse()

    async def ResumeFromCheckpoint(
        self, request: train_pb.ResumeFromCheckpointRequest, context: Context
    ) -> train_pb.ResumeFromCheckpointResponse:
        _require_count(steps=request.steps, data_cursor=request.data_cursor)
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
    """Serve the calls that carry trajectories without decoding them.

    Call it after the generated functions: it replaces their handlers of these methods.
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


def _page(token: str) -> int:
    if token and not token.isdecimal():
        raise InvalidArgumentError(f"page_token: {token!r}; next_page_token of the page before, or empty")
    return int(token or 0)


def _is_validation(purpose: "pb.Purpose.ValueType") -> bool:
    return purpose == pb.PURPOSE_VALIDATION


def _require_count(**counts: int) -> None:
    for name, value in counts.items():
        if abs(value) > MAX_COUNT:
            raise InvalidArgumentError(f"{name}: {value}; at most {MAX_COUNT}")
