"""SDK for rollout workers in Python: lease tasks, sample from the policy, put trajectories. Needs nothing but gRPC.

async with open_rollout_client("pool:50051", "weight-sync:50051", worker_id="mine") as client:
    async for lease in client.leases(max_samples=16):
        completions = await client.policy.generate(prompt_ids, len(lease.samples), Sampling(max_new_tokens=32))
        await client.put(lease.purpose, [...])
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from nexrl.errors import InvalidArgumentError, ResourceExhaustedError
from nexrl.policy import Policy
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.v1 import data_loader_service_pb2 as data_loader
from nexrl.v1.data_loader_service_pb2_grpc import DataLoaderServiceStub
from nexrl.v1.packed_pb2 import PackedPutSamplesRequest
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION, Purpose, PutOutcome, SampleLease, SampleResult, TaskLease
from nexrl.v1.trajectory_pool_service_pb2 import PutSamplesResponse

MAX_PUT_BYTES = 8 * 2**20
"""Results of one call; more are put in several. Far below the largest message, which a single result may need."""

PutCall: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Any, PutSamplesResponse]"

LEASE_WAIT_SECONDS = 20.0
CALL_SECONDS = 60.0


@dataclass
class _Put:
    results: Sequence[bytes]
    outcomes: "asyncio.Future[list[PutOutcome.ValueType]]"

    def succeed(self, outcomes: list[PutOutcome.ValueType]) -> None:
        if not self.outcomes.done():  # it is done when its waiter was cancelled
            self.outcomes.set_result(outcomes)

    def fail(self, error: Exception) -> None:
        if not self.outcomes.done():
            self.outcomes.set_exception(error)


class RolloutClient:
    """The pool as a rollout worker sees it, and the policy. Every call is repeated while the pool is away, for
    CALL_SECONDS."""

    def __init__(self, pool: grpc.aio.Channel, policy: Policy, *, model_tag: str = "default", worker_id: str) -> None:
        self.policy = policy
        self.model_tag = model_tag
        self.worker_id = worker_id
        self._data_loader = DataLoaderServiceStub(pool)
        # Results go out as the bytes that they became when they were put. Both calls answer in the same form.
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
        """Lease at most `max_samples` samples; waits for a grant, at most `wait_seconds`.

        The same `request_id` gets the same answer again.
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
        """Leases without end, for training and validation alike; ends when the data is exhausted.

        Samples that take longer than the experiment's `rollout.leaseSeconds` need `renew`.
        """
        while True:
            response = await self.lease(max_samples)
            for lease in response.leases:
                yield lease
            if response.exhausted and not response.leases:
                return

    async def renew(self, samples: Iterable[SampleLease], purpose: Purpose.ValueType) -> set[str]:
        """Move the deadline of leases; gives the ids of the samples that are lost and must be worked on no longer."""
        request = data_loader.RenewLeasesRequest(
            request_id=new_request_id(), model_tag=self.model_tag, samples=samples, purpose=purpose
        )
        response = await call(self._data_loader.RenewLeases, request, timeout_seconds=CALL_SECONDS)
        return set(response.lost_sample_ids)

    async def return_samples(self, samples: Iterable[SampleLease], purpose: Purpose.ValueType) -> int:
        """Give leases back unattempted, to be granted again at once; gives how many were still held."""
        request = data_loader.ReturnSamplesRequest(
            request_id=new_request_id(), model_tag=self.model_tag, samples=samples, purpose=purpose
        )
        return (await call(self._data_loader.ReturnSamples, request, timeout_seconds=CALL_SECONDS)).returned

    async def put(self, purpose: Purpose.ValueType, results: Sequence[SampleResult]) -> list[PutOutcome.ValueType]:
        """Store what became of samples, where their purpose wants it; gives what was done with each, in this order.

        Puts that come while another is under way go together in the next call: groups tend to end at the same time.
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
            else:  # the pool refuses a call whole: whoever is to blame must not take the others along
                for put in puts:
                    await self._put_together(purpose, [put])
        except Exception as error:  # noqa: BLE001  # whatever it is: those who wait must not wait for ever
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
    """A client of a running experiment, host:port each; it follows the replicas for as long as the block runs."""
    async with connect(pool_address) as pool, connect(weight_sync_address) as weight_sync:
        policy = Policy(weight_sync, model_tag=model_tag, max_retries=max_retries)
        following = asyncio.create_task(policy.follow_replicas())
        try:
            yield RolloutClient(pool, policy, model_tag=model_tag, worker_id=worker_id)
        finally:
            following.cancel()
            await policy.close()


async def _until_there_is_room(method: "PutCall", request: PackedPutSamplesRequest) -> Sequence[PutOutcome.ValueType]:
    """Put as long as the pool says that it is full: what has been sampled is dear, and the trainer makes room."""
    while True:
        try:
            return (await call(method, request, timeout_seconds=CALL_SECONDS)).outcomes
        except ResourceExhaustedError as error:
            if error.retry_after_seconds is None:
                raise


def _parts(results: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The results in parts of at most MAX_PUT_BYTES; a result larger than that has a part of its own."""
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
