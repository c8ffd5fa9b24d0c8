"""Runs the trajectory pool as a service in the test. Provides a client of its four services."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from nexrl.errors import ResourceExhaustedError
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.rpc.status import error_from_call
from nexrl.spec import Experiment
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import encode_train_batch
from nexrl.v1 import data_loader_service_pb2 as loader_pb
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1 import validator_service_pb2 as validator_pb
from nexrl.v1.data_loader_service_pb2_grpc import DataLoaderServiceStub
from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceStub
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub
from nexrl_data_reader import server as data_reader
from nexrl_trajectory_pool import server
from tests.support.patience import LIMIT_SECONDS
from tests.support.services import running_service

if TYPE_CHECKING:
    from nexrl.v1.data_loader_service_pb2_grpc import DataLoaderServiceAsyncStub
    from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceAsyncStub
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceAsyncStub
    from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceAsyncStub

TAG = "default"
UNTIL_WOKEN_SECONDS = 2 * LIMIT_SECONDS
"""Time of a wait that must be woken: the patience of a test ends before."""


def trajectory(reward: float = 1.0, version: int = 0, **metadata: str) -> pb.Trajectory:
    """Return a trajectory of two context tokens and two tokens that `version` generated."""
    return pb.Trajectory(
        token_ids=[4, 5, 6, 2],
        loss_mask=[False, False, True, True],
        logprobs=[0.0, 0.0, -0.5, -0.25],
        spans=[pb.PolicySpan(start=2, end=4, policy_version=version)],
        completions=[drawn_span(2, 4)],
        reward=reward,
        reward_components={"exact": float(reward == 1.0)},
        metadata=metadata,
    )


def drawn_span(start: int, end: int) -> pb.CompletionSpan:
    """Return a span of tokens that were sampled with the default parameters."""
    return pb.CompletionSpan(start=start, end=end, draw=pb.Draw(temperature=1.0, top_p=1.0))


def scored(sample: pb.SampleLease, *trajectories: pb.Trajectory) -> pb.SampleResult:
    """Return a successful result of a sample."""
    return pb.SampleResult(
        sample_id=sample.sample_id,
        attempt=sample.attempt,
        verdict=pb.VERDICT_OK,
        trajectories=trajectories or [trajectory()],
    )


def failed(sample: pb.SampleLease, verdict: "pb.Verdict.ValueType" = pb.VERDICT_ENV_ERROR) -> pb.SampleResult:
    """Return the result of a failed attempt."""
    return pb.SampleResult(sample_id=sample.sample_id, attempt=sample.attempt, verdict=verdict, error="broken")


class PoolClient:
    """A client of the four services at one address."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.loader: DataLoaderServiceAsyncStub = DataLoaderServiceStub(channel)
        self.pool: TrajectoryPoolServiceAsyncStub = TrajectoryPoolServiceStub(channel)
        self.train: TrainBatchPoolServiceAsyncStub = TrainBatchPoolServiceStub(channel)
        self.validator: ValidatorServiceAsyncStub = ValidatorServiceStub(channel)

    async def lease(
        self, max_samples: int = 64, *, wait_seconds: float = 0, request_id: str = "", tag: str = TAG
    ) -> loader_pb.LeaseTasksResponse:
        """Call LeaseTasks."""
        request = loader_pb.LeaseTasksRequest(
            request_id=request_id or new_request_id(),
            model_tag=tag,
            max_samples=max_samples,
            wait_seconds=wait_seconds,
        )
        return await call(self.loader.LeaseTasks, request, timeout_seconds=wait_seconds + LIMIT_SECONDS)

    async def put(
        self, results: Sequence[pb.SampleResult], *, request_id: str = "", purpose: int = pb.PURPOSE_TRAINING
    ) -> list[str]:
        """Call PutSamples or PutValidationSamples. Returns the names of the outcomes."""
        request_id = request_id or new_request_id()
        if purpose == pb.PURPOSE_VALIDATION:
            message = validator_pb.PutValidationSamplesRequest(request_id=request_id, model_tag=TAG, results=results)
            put = self.validator.PutValidationSamples
            outcomes = (await call(put, message, timeout_seconds=LIMIT_SECONDS)).outcomes
        else:
            request = pool_pb.PutSamplesRequest(request_id=request_id, model_tag=TAG, results=results)
            outcomes = (await call(self.pool.PutSamples, request, timeout_seconds=LIMIT_SECONDS)).outcomes
        return [pb.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_") for outcome in outcomes]

    async def refused_for_now(self, results: Sequence[pb.SampleResult]) -> str:
        """Call PutSamples once. Returns the message of the refusal, which asks for a repeated call."""
        request = pool_pb.PutSamplesRequest(request_id=new_request_id(), model_tag=TAG, results=results)
        try:
            await self.pool.PutSamples(request, timeout=LIMIT_SECONDS)  # `call` would repeat it
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_call(rpc_error)
            assert isinstance(error, ResourceExhaustedError), error
            assert error.retry_after_seconds is not None, error
            return str(error)
        raise AssertionError("it was accepted")

    async def fill(self, version: int = 0, rewards: Mapping[int, float] | None = None) -> list[str]:
        """Lease and produce all samples that the credit allows. Sample k of each task has reward `rewards[k]`, or 1."""
        filled: list[str] = []
        while leases := (await self.lease()).leases:
            for lease in leases:
                rewarded = [(s, (rewards or {}).get(int(s.sample_id.partition(".")[2]), 1.0)) for s in lease.samples]
                results = [scored(s, trajectory(reward, version)) for s, reward in rewarded]
                await self.put(results, purpose=lease.purpose)
                filled += [sample.sample_id for sample in lease.samples]
        return filled

    async def lease_batch(
        self, *, wait_seconds: float = 0, batch_size: int = 0, tag: str = TAG, request_id: str = ""
    ) -> pool_pb.LeaseBatchResponse:
        """Call LeaseBatch."""
        request = pool_pb.LeaseBatchRequest(
            request_id=request_id or new_request_id(), model_tag=tag, batch_size=batch_size, wait_seconds=wait_seconds
        )
        return await call(self.pool.LeaseBatch, request, timeout_seconds=wait_seconds + LIMIT_SECONDS)

    async def put_train_batch(self, lease: pool_pb.BatchLease, *, request_id: str = "") -> train_pb.TrainBatch:
        """Call PutTrainBatch with a train batch that has no sequence."""
        samples = [sample.sample_id for group in lease.groups for sample in group.samples]
        tensors = encode_train_batch(TrainBatch.pack([]))
        batch = train_pb.TrainBatch(batch_id=lease.batch_id, model_tag=TAG, sample_ids=samples, tensors=tensors)
        request = train_pb.PutTrainBatchRequest(
            request_id=request_id or new_request_id(), train_batch=batch, batch_attempt=lease.attempt
        )
        await call(self.train.PutTrainBatch, request, timeout_seconds=LIMIT_SECONDS)
        batch.put_id = request.request_id
        return batch

    async def lease_train_batch(
        self, step: int, incarnation: int = 0, *, wait_seconds: float = 0
    ) -> train_pb.LeaseTrainBatchResponse:
        """Call LeaseTrainBatch."""
        request = train_pb.LeaseTrainBatchRequest(
            request_id=new_request_id(), model_tag=TAG, step=step, incarnation=incarnation, wait_seconds=wait_seconds
        )
        return await call(self.train.LeaseTrainBatch, request, timeout_seconds=wait_seconds + LIMIT_SECONDS)

    async def resume(self, steps: int = 0, data_cursor: int = 0) -> train_pb.ResumeFromCheckpointResponse:
        """Call ResumeFromCheckpoint."""
        request = train_pb.ResumeFromCheckpointRequest(
            request_id=new_request_id(), model_tag=TAG, steps=steps, data_cursor=data_cursor
        )
        return await call(self.train.ResumeFromCheckpoint, request, timeout_seconds=LIMIT_SECONDS)

    async def ack(self, step: int, incarnation: int = 0) -> None:
        """Call AckTrainBatch for the train batch of the step."""
        batch = (await self.lease_train_batch(step, incarnation)).train_batch
        request = train_pb.AckTrainBatchRequest(
            request_id=new_request_id(),
            model_tag=TAG,
            step=step,
            incarnation=incarnation,
            sample_ids=batch.sample_ids,
            put_id=batch.put_id,
        )
        await call(self.train.AckTrainBatch, request, timeout_seconds=LIMIT_SECONDS)

    async def set_version(self, version: int) -> int:
        """Call SetPolicyVersion."""
        request = pool_pb.SetPolicyVersionRequest(request_id=new_request_id(), model_tag=TAG, policy_version=version)
        return (await call(self.pool.SetPolicyVersion, request, timeout_seconds=LIMIT_SECONDS)).policy_version

    async def audit(self) -> pool_pb.LedgerAudit:
        """Call AuditLedger."""
        request = pool_pb.AuditLedgerRequest(model_tag=TAG)
        return (await call(self.pool.AuditLedger, request, timeout_seconds=LIMIT_SECONDS)).audits[0]

    async def state(self) -> pool_pb.PoolState:
        """Call GetTrajectoryPoolState."""
        request = pool_pb.GetTrajectoryPoolStateRequest(model_tag=TAG)
        return (await call(self.pool.GetTrajectoryPoolState, request, timeout_seconds=LIMIT_SECONDS)).pools[0]

    async def loader_state(
        self, purpose: "pb.Purpose.ValueType" = pb.PURPOSE_TRAINING
    ) -> loader_pb.GetDataLoaderStateResponse:
        """Call GetDataLoaderState."""
        request = loader_pb.GetDataLoaderStateRequest(model_tag=TAG, purpose=purpose)
        return await call(self.loader.GetDataLoaderState, request, timeout_seconds=LIMIT_SECONDS)


@asynccontextmanager
async def running_pool(folder: Path, redis_url: str, experiment: Experiment) -> AsyncIterator[PoolClient]:
    """Run one process of the trajectory pool with its data reader, and yield a client of it."""
    async with (
        running_service(folder, data_reader.start, experiment) as reader,
        running_service(folder, server.start, experiment, redis_url=redis_url, data_reader=reader.address) as process,
        connect(process.address) as channel,
    ):
        yield PoolClient(process.address, channel)


Deploy = Callable[..., Awaitable[PoolClient]]
"""Starts one more process of the same pool. Keywords are sections of the experiment."""


def samples_of(leases: loader_pb.LeaseTasksResponse) -> list[str]:
    """Return the ids of all leased samples."""
    return [sample.sample_id for lease in leases.leases for sample in lease.samples]


def grouped(batch: pool_pb.BatchLease) -> dict[str, list[str]]:
    """Return the sample ids of a batch by group."""
    return {group.group_id: [sample.sample_id for sample in group.samples] for group in batch.groups}
