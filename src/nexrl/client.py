"""Python SDK for your own rollout workers, algorithm processors and trainers. Its only dependency is gRPC.

A rollout worker leases tasks, samples from the policy and puts trajectories:

async with open_rollout_client("pool:50051", "weight-sync:50051", worker_id="mine") as client:
    async for lease in client.leases(max_samples=16):
        completions = await client.policy.generate(prompt_ids, len(lease.samples), Sampling(max_new_tokens=32))
        await client.put(lease.purpose, [...])

An algorithm processor (`algorithm.processor: external`) leases batches and puts train batches:

client = BatchClient(connect("pool:50051"), worker_id="mine")
while not (answer := await client.lease()).exhausted:
    if answer.HasField("lease"):
        batch = decode_batch(answer.lease)  # nexrl.batch_proto
        await client.put(answer.lease, TrainBatch.pack([...]))  # nexrl.train_batch
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from nexrl.errors import InvalidArgumentError, ResourceExhaustedError
from nexrl.policy import Policy
from nexrl.rpc.client import call, call_in_pieces, connect, new_request_id
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import encode_train_batch
from nexrl.v1 import data_loader_service_pb2 as data_loader
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.data_loader_service_pb2_grpc import DataLoaderServiceStub
from nexrl.v1.packed_pb2 import PackedPutSamplesRequest
from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceStub
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION, Purpose, PutOutcome, SampleLease, SampleResult, TaskLease
from nexrl.v1.trajectory_pool_service_pb2 import PutSamplesResponse
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub

MAX_PUT_BYTES = 8 * 2**20
"""Largest size of the results in one call. A single larger result is sent in a call of its own."""

PutCall: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Any, PutSamplesResponse]"

LEASE_WAIT_SECONDS = 20.0
CALL_SECONDS = 60.0


@dataclass
class _Put:
    results: Sequence[bytes]
    outcomes: "asyncio.Future[list[PutOutcome.ValueType]]"

    def succeed(self, outcomes: list[PutOutcome.ValueType]) -> None:
        if not self.outcomes.done():  # the future is done if its waiter was cancelled
            self.outcomes.set_result(outcomes)

    def fail(self, error: Exception) -> None:
        if not self.outcomes.done():
            self.outcomes.set_exception(error)


class RolloutClient:
    """The client of a rollout worker: the calls to the pool, and the policy.

    While the pool is unavailable, a call is retried for CALL_SECONDS.
    """

    def __init__(self, pool: grpc.aio.Channel, policy: Policy, *, model_tag: str = "default", worker_id: str) -> None:
        self.policy = policy
        self.model_tag = model_tag
        self.worker_id = worker_id
        self._data_loader = DataLoaderServiceStub(pool)
        # Results are sent as the bytes that `put` made of them. Both calls have the same response.
        put = partial(
            pool.unary_unary,
            request_serializer=PackedPutSamplesRequest.SerializeToString,
            response_deserializer=PutSamplesResponse.FromString,
        )
        self._put_training: PutCall = put("/nexrl.v1.TrajectoryPoolService/PutSamples")
        self._put_validation: PutCall = put("/nexrl.v1.ValidatorService/PutValidationSamples")
        self._puts: defaultdict[Purpose.ValueType, list[_Put]] = defaultdict(list)
        self._putting: dict[Purpose.ValueType, asyncio.Task[None]] = {}

    async def lease(
        self, max_samples: int, *, wait_seconds: float = LEASE_WAIT_SECONDS, request_id: str | None = None
    ) -> data_loader.LeaseTasksResponse:
        """Lease at most `max_samples` samples. Waits up to `wait_seconds` for the first.

        The request is idempotent: a repeated `request_id` returns the same response.
        """
        request = data_loader.LeaseTasksRequest(
            request_id=request_id or new_request_id(),
            model_tag=self.model_tag,
            worker_id=self.worker_id,
            max_samples=max_samples,
            wait_seconds=wait_seconds,
        )
        return await call(self._data_loader.LeaseTasks, request, timeout_seconds=wait_seconds + CALL_SECONDS)

    async def leases(self, max_samples: int) -> AsyncIterator[TaskLease]:
        """Yield leases for training and validation until the data is exhausted.

        Call `renew` for samples that take longer than the experiment's `rollout.leaseSeconds`.
        """
        while True:
            response = await self.lease(max_samples)
            for lease in response.leases:
                yield lease
            if response.exhausted and not response.leases:
                return

    async def renew(self, samples: Iterable[SampleLease], purpose: Purpose.ValueType) -> set[str]:
        """Extend leases. Return the ids of the samples whose lease is lost. Stop working on these samples."""
        request = data_loader.RenewLeasesRequest(
            request_id=new_request_id(), model_tag=self.model_tag, samples=samples, purpose=purpose
        )
        response = await call(self._data_loader.RenewLeases, request, timeout_seconds=CALL_SECONDS)
        return set(response.lost_sample_ids)

    async def return_samples(self, samples: Iterable[SampleLease], purpose: Purpose.ValueType) -> int:
        """Return samples to the pool, which requeues them at once. This does not count as a failed attempt.

        Returns how many of them were still leased.
        """
        request = data_loader.ReturnSamplesRequest(
            request_id=new_request_id(), model_tag=self.model_tag, samples=samples, purpose=purpose
        )
        return (await call(self._data_loader.ReturnSamples, request, timeout_seconds=CALL_SECONDS)).returned

    async def put(self, purpose: Purpose.ValueType, results: Sequence[SampleResult]) -> list[PutOutcome.ValueType]:
        """Store results. Return their outcomes in the same order. `purpose` is the purpose of their lease.

        While one call is in flight, later puts are collected and sent together in the next call. This saves calls,
        because samples of a group often end at the same time.
        """
        put = _Put([r.SerializeToString() for r in results], asyncio.get_running_loop().create_future())
        self._puts[purpose].append(put)
        if purpose not in self._putting:
            self._putting[purpose] = asyncio.create_task(self._put_all(purpose))
        return await put.outcomes

    async def _put_all(self, purpose: Purpose.ValueType) -> None:
        try:
            while puts := self._puts.pop(purpose, []):
                await self._put_together(purpose, puts)
        finally:
            del self._putting[purpose]

    async def _put_together(self, purpose: Purpose.ValueType, puts: Sequence["_Put"]) -> None:
        try:
            outcomes = await self._put_in_parts(purpose, [result for put in puts for result in put.results])
        except InvalidArgumentError as error:
            if len(puts) == 1:
                puts[0].fail(error)
            else:  # the pool refused the whole call: retry each put alone, so that only the invalid one fails
                for put in puts:
                    await self._put_together(purpose, [put])
        except Exception as error:  # noqa: BLE001  # after any error, the callers of `put` must not wait forever
            for put in puts:
                put.fail(error)
        else:
            for put in puts:
                put.succeed(outcomes[: len(put.results)])
                outcomes = outcomes[len(put.results) :]

    async def _put_in_parts(self, purpose: Purpose.ValueType, results: Sequence[bytes]) -> list[PutOutcome.ValueType]:
        method = self._put_validation if purpose == PURPOSE_VALIDATION else self._put_training
        outcomes: list[PutOutcome.ValueType] = []
        for part in _parts(results):
            request = PackedPutSamplesRequest(
                request_id=new_request_id(), model_tag=self.model_tag, worker_id=self.worker_id, results=part
            )
            outcomes += await _until_there_is_room(method, request)
        return outcomes


@asynccontextmanager
async def open_rollout_client(
    pool_address: str, weight_sync_address: str, *, worker_id: str, model_tag: str = "default", max_retries: int = 3
) -> AsyncIterator[RolloutClient]:
    """Open a client of a running experiment. Both addresses are host:port."""
    async with connect(pool_address) as pool, connect(weight_sync_address) as weight_sync:
        policy = Policy(weight_sync, model_tag=model_tag, max_retries=max_retries)
        following = asyncio.create_task(policy.follow_replicas())
        try:
            yield RolloutClient(pool, policy, model_tag=model_tag, worker_id=worker_id)
        finally:
            following.cancel()
            await policy.close()


class BatchClient:
    """The client of an algorithm processor: leases batches and puts train batches.

    While the pool is unavailable, a call is retried for CALL_SECONDS.
    """

    def __init__(self, pool: grpc.aio.Channel, *, model_tag: str = "default", worker_id: str) -> None:
        self.model_tag = model_tag
        self.worker_id = worker_id
        self._channel = pool
        self._pool = TrajectoryPoolServiceStub(pool)

    async def lease(self, *, wait_seconds: float = LEASE_WAIT_SECONDS) -> pool_pb.LeaseBatchResponse:
        """Lease the next batch. Waits up to `wait_seconds` for one.

        If a batch is still leased to `worker_id`, returns that batch first. Raises LeaseLostError if Redis has lost the
        batch; a later call leases the batch that the ledger forms instead.
        """
        request = pool_pb.LeaseBatchRequest(
            request_id=new_request_id(),
            model_tag=self.model_tag,
            wait_seconds=wait_seconds,
            worker_id=self.worker_id,
        )
        return await call(self._pool.LeaseBatch, request, timeout_seconds=wait_seconds + CALL_SECONDS)

    async def put(
        self, lease: pool_pb.BatchLease, batch: TrainBatch, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Put the train batch that was made from a leased batch. This acknowledges the leased batch.

        `metrics` become metrics of the step. Raises LeaseLostError if the batch is now leased to another processor, or
        if a trainer has started since the lease. Drop the train batch then, and lease again.
        """
        message = train_pb.TrainBatch(
            batch_id=lease.batch_id,
            model_tag=lease.model_tag,
            tensors=encode_train_batch(batch),
            metrics=metrics,
            sample_ids=[sample.sample_id for group in lease.groups for sample in group.samples],
            data_cursor=lease.data_cursor,
        )
        request = train_pb.PutTrainBatchRequest(
            request_id=new_request_id(), train_batch=message, batch_attempt=lease.attempt
        )
        await call_in_pieces(
            self._channel,
            "/nexrl.v1.TrainBatchPoolService/PutTrainBatch",
            request,
            train_pb.PutTrainBatchResponse.FromString,
            timeout_seconds=CALL_SECONDS,
        )


class TrainBatchClient:
    """The client of a trainer. Call `resume` once, then `lease` and `ack` for each step, and `commit` checkpoints.

    While the pool is unavailable, a call is retried for CALL_SECONDS. After `resume`, each call raises
    FailedPreconditionError (LeaseLostError) if the ledger no longer agrees with the answers that this trainer got
    before. The cause is a newer trainer that has resumed, or a Redis that lost its last writes. Resume from a
    checkpoint then.
    """

    def __init__(self, pool: grpc.aio.Channel, *, model_tag: str = "default") -> None:
        self.model_tag = model_tag
        self.incarnation = 0
        """Number of this trainer, set by `resume`. The pool refuses the calls of trainers with a lower number."""
        self._pool = TrainBatchPoolServiceStub(pool)

    async def resume(self, steps: int, data_cursor: int = 0) -> train_pb.ResumeFromCheckpointResponse:
        """Resume from a checkpoint that contains `steps` optimizer steps. Calls of earlier trainers fail from now on.

        `data_cursor` is the position at which the data continues if the ledger is new. Raises FailedPreconditionError
        if the ledger cannot continue from this step.
        """
        request = train_pb.ResumeFromCheckpointRequest(
            request_id=new_request_id(), model_tag=self.model_tag, steps=steps, data_cursor=data_cursor
        )
        answer = await call(self._pool.ResumeFromCheckpoint, request, timeout_seconds=CALL_SECONDS)
        self.incarnation = answer.incarnation
        return answer

    async def lease(self, step: int, *, wait_seconds: float = LEASE_WAIT_SECONDS) -> train_pb.LeaseTrainBatchResponse:
        """Lease the train batch of `step`; the first step is 0. Waits up to `wait_seconds` for the train batch."""
        request = train_pb.LeaseTrainBatchRequest(
            request_id=new_request_id(),
            model_tag=self.model_tag,
            step=step,
            wait_seconds=wait_seconds,
            incarnation=self.incarnation,
        )
        return await call(self._pool.LeaseTrainBatch, request, timeout_seconds=wait_seconds + CALL_SECONDS)

    async def ack(self, step: int, batch: train_pb.TrainBatch) -> train_pb.AckTrainBatchResponse:
        """Record that `step` has trained `batch`. The answer says if the pool needs a checkpoint to free memory."""
        request = train_pb.AckTrainBatchRequest(
            request_id=new_request_id(),
            model_tag=self.model_tag,
            step=step,
            incarnation=self.incarnation,
            sample_ids=batch.sample_ids,
            put_id=batch.put_id,
        )
        return await call(self._pool.AckTrainBatch, request, timeout_seconds=CALL_SECONDS)

    async def fail(self, step: int, batch: train_pb.TrainBatch) -> bool:
        """Record that training `batch` as `step` failed. Returns True if the pool dropped its samples.

        Lease the step again afterwards. After the first failure, the pool returns the same batch. After it has dropped
        the samples, it returns a batch without sequences.
        """
        request = train_pb.FailTrainBatchRequest(
            request_id=new_request_id(),
            model_tag=self.model_tag,
            step=step,
            incarnation=self.incarnation,
            sample_ids=batch.sample_ids,
            put_id=batch.put_id,
        )
        return (await call(self._pool.FailTrainBatch, request, timeout_seconds=CALL_SECONDS)).dropped

    async def commit(self, steps: int) -> None:
        """Record that a checkpoint contains `steps` steps. The pool deletes their train batches."""
        request = train_pb.CommitCheckpointRequest(
            request_id=new_request_id(), model_tag=self.model_tag, steps=steps, incarnation=self.incarnation
        )
        await call(self._pool.CommitCheckpoint, request, timeout_seconds=CALL_SECONDS)

    async def state(self) -> train_pb.GetTrainBatchPoolStateResponse:
        """Return how many train batches are waiting, how many were trained, and how many are in a checkpoint."""
        request = train_pb.GetTrainBatchPoolStateRequest(model_tag=self.model_tag)
        return await call(self._pool.GetTrainBatchPoolState, request, timeout_seconds=CALL_SECONDS)


async def _until_there_is_room(method: "PutCall", request: PackedPutSamplesRequest) -> Sequence[PutOutcome.ValueType]:
    """Put the results. Retries without limit while the pool is full: sampling again would cost more than waiting."""
    while True:
        try:
            return (await call(method, request, timeout_seconds=CALL_SECONDS)).outcomes
        except ResourceExhaustedError as error:
            if error.retry_after_seconds is None:
                raise


def _parts(results: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the results in parts of at most MAX_PUT_BYTES. A single larger result is a part of its own."""
    part: list[bytes] = []
    part_bytes = 0
    for result in results:
        if part and part_bytes + len(result) > MAX_PUT_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(result)
        part_bytes += len(result)
    if part:
        yield part
