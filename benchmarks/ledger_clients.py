"""The client processes of `ledger.py`, of our pool and of raw Redis; each function here is one process.

A producer hands back how long each of its puts took, the consumer when each batch was used up, in seconds of the
machine's monotonic clock.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Semaphore
from typing import TYPE_CHECKING

import grpc
import redis

from nexrl.client import RolloutClient
from nexrl.malloc import keep_freed_memory
from nexrl.policy import Policy
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import encode_train_batch
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceStub
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub

if TYPE_CHECKING:
    from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceAsyncStub
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceAsyncStub

TAG = "default"
GROUP_SIZE = 8
BATCH_SIZE = 64
BATCH_GROUPS = BATCH_SIZE // GROUP_SIZE
PAYLOAD_BYTES = 8192
TOKENS = 1024
PROMPT_TOKENS = 256
FIRST_TOKEN, LAST_TOKEN = 128, 515
"""Two bytes each on the wire, as most ids of a large vocabulary."""
CHECKPOINT_STEPS = 10
PROCESSORS = 2
"""Parts of the consumer that each have a batch in hand."""
CALL_SECONDS = 60.0


AHEAD_BATCHES = 16
"""Batches that producers may be ahead: credit of ours, room of the raw side."""


@dataclass(frozen=True)
class Work:
    """What one producer does: `groups` of them, put `together` at a time, as fast as it can or as often as said."""

    groups: int
    together: int = 1
    puts_per_second: float = 0.0


def example_result() -> pb.SampleResult:
    """A sample of 1,024 tokens that takes 8 KiB on the wire."""
    chance = random.Random(0)
    completion_tokens = TOKENS - PROMPT_TOKENS
    trajectory = pb.Trajectory(
        token_ids=[chance.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(TOKENS)],
        loss_mask=[False] * PROMPT_TOKENS + [True] * completion_tokens,
        logprobs=[0.0] * PROMPT_TOKENS + [-chance.expovariate(1.0) for _ in range(completion_tokens)],
        spans=[pb.PolicySpan(start=PROMPT_TOKENS, end=TOKENS, policy_version=100)],
        completions=[pb.CompletionSpan(start=PROMPT_TOKENS, end=TOKENS, draw=pb.Draw(temperature=1.0, top_p=1.0))],
        reward=1.0,
        reward_components={"exact": 1.0, "format": 1.0},
        metadata={"data_source": "mock", "attempt": "first"},
        prompt="Sort these digits.",
        finish_reason="stop",
    )
    result = pb.SampleResult(sample_id="10000.0", attempt=1, verdict=pb.VERDICT_OK, trajectories=[trajectory])
    filled = result.trajectories[0]
    filled.response = "x" * (PAYLOAD_BYTES - result.ByteSize() - 16)  # room for the lengths, which grow with it
    filled.response += "x" * (PAYLOAD_BYTES - result.ByteSize())
    return result


# our pool


def pool_producer(target: str, number: int, work: Work, durations: "SimpleQueue[list[float]]") -> None:
    """Lease a batch's worth of samples, put each group's results with one call of the SDK; then the next."""
    keep_freed_memory()
    durations.put(asyncio.run(_produce(target, number, work)))


async def _produce(target: str, number: int, work: Work) -> list[float]:
    durations: list[float] = []
    async with connect(target) as channel:
        client = RolloutClient(channel, Policy(channel), worker_id=f"producer-{number}")
        results = [[example_result() for _ in range(GROUP_SIZE)] for _ in range(work.together)]
        pauses, groups = _pauses(work), 0
        while groups < work.groups:
            leases = (await client.lease(BATCH_SIZE)).leases
            groups += len(leases)
            for first in range(0, len(leases), work.together):
                await asyncio.sleep(next(pauses))
                began = time.perf_counter()
                together = zip(leases[first : first + work.together], results, strict=False)
                await asyncio.gather(*(_put(client, lease, group) for lease, group in together))
                durations.append(time.perf_counter() - began)
    return durations


async def _put(client: RolloutClient, lease: pb.TaskLease, results: Sequence[pb.SampleResult]) -> None:
    # The oldest version that is not stale in the batch that the group will be in; it is committed by then.
    version = max(0, int(lease.group_id) // BATCH_GROUPS - AHEAD_BATCHES)
    for sample, result in zip(lease.samples, results, strict=True):
        result.sample_id, result.attempt = sample.sample_id, sample.attempt
        result.trajectories[0].spans[0].policy_version = version
    outcomes = await client.put(pb.PURPOSE_TRAINING, results)
    assert outcomes == [pb.PUT_OUTCOME_ACCEPTED] * GROUP_SIZE


def pool_consumer(target: str, batches: int, times: Connection) -> None:
    """What a trainer's two parts do, at the same time: train batches are made of batches, and steps acknowledged."""
    keep_freed_memory()
    asyncio.run(_consume(target, batches, times))


async def _consume(target: str, batches: int, times: Connection) -> None:
    async with connect(target) as channel:
        trainer = _Trainer(channel)
        await trainer.resume()
        async with asyncio.TaskGroup() as tasks:
            for number in range(PROCESSORS):
                tasks.create_task(trainer.process(f"processor-{number}", batches))
            tasks.create_task(trainer.train(batches, times))


class _Trainer:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._pool: TrajectoryPoolServiceAsyncStub = TrajectoryPoolServiceStub(channel)
        self._train: TrainBatchPoolServiceAsyncStub = TrainBatchPoolServiceStub(channel)
        self._incarnation = 0
        self._leased = 0
        self._queued: defaultdict[int, asyncio.Future[train_pb.PutTrainBatchRequest]] = defaultdict(asyncio.Future)

    async def resume(self) -> None:
        """Begin at step 0."""
        request = train_pb.ResumeFromCheckpointRequest(request_id=new_request_id(), model_tag=TAG)
        answer = await call(self._train.ResumeFromCheckpoint, request, timeout_seconds=CALL_SECONDS)
        self._incarnation = answer.incarnation

    async def process(self, worker: str, batches: int) -> None:
        """Lease batches, and put a train batch for each, until all parts together have had `batches`."""
        while self._leased < batches:
            self._leased += 1
            lease = await self._lease(worker)
            samples = [sample.sample_id for group in lease.groups for sample in group.samples]
            assert len(samples) == BATCH_SIZE
            tensors = encode_train_batch(TrainBatch.pack([]))
            batch = train_pb.TrainBatch(batch_id=lease.batch_id, model_tag=TAG, sample_ids=samples, tensors=tensors)
            put = train_pb.PutTrainBatchRequest(
                request_id=new_request_id(), train_batch=batch, batch_attempt=lease.attempt
            )
            await call(self._train.PutTrainBatch, put, timeout_seconds=CALL_SECONDS)
            self._queued[lease.batch_id].set_result(put)

    async def train(self, batches: int, times: Connection) -> None:
        """Acknowledge steps, and now and then commit a checkpoint and move the policy version."""
        for step in range(batches):
            put = await self._queued[step]
            del self._queued[step]
            ack = train_pb.AckTrainBatchRequest(
                request_id=new_request_id(),
                model_tag=TAG,
                step=step,
                incarnation=self._incarnation,
                sample_ids=put.train_batch.sample_ids,
                put_id=put.request_id,
            )
            await call(self._train.AckTrainBatch, ack, timeout_seconds=CALL_SECONDS)
            times.send(time.perf_counter())
            if (step + 1) % CHECKPOINT_STEPS == 0:
                await self._commit(step + 1)

    async def _lease(self, worker: str) -> pool_pb.BatchLease:
        while True:
            request = pool_pb.LeaseBatchRequest(
                request_id=new_request_id(), model_tag=TAG, worker_id=worker, wait_seconds=20.0
            )
            answer = await call(self._pool.LeaseBatch, request, timeout_seconds=CALL_SECONDS)
            if answer.HasField("lease"):
                return answer.lease

    async def _commit(self, steps: int) -> None:
        version = pool_pb.SetPolicyVersionRequest(request_id=new_request_id(), model_tag=TAG, policy_version=steps)
        await call(self._pool.SetPolicyVersion, version, timeout_seconds=CALL_SECONDS)
        commit = train_pb.CommitCheckpointRequest(
            request_id=new_request_id(), model_tag=TAG, steps=steps, incarnation=self._incarnation
        )
        await call(self._train.CommitCheckpoint, commit, timeout_seconds=CALL_SECONDS)


# raw Redis


@dataclass(frozen=True)
class Handover:
    """Names of groups from raw producers to the raw consumer, beside Redis; `room` bounds how many there are."""

    names: "SimpleQueue[str]"
    room: Semaphore


def raw_producer(url: str, number: int, work: Work, durations: "SimpleQueue[list[float]]", handover: Handover) -> None:
    """SET the payloads of some groups in one pipeline."""
    keep_freed_memory()
    connection, payload = redis.Redis.from_url(url), example_result().SerializeToString()
    found: list[float] = []
    for first in range(0, work.groups, work.together):
        groups = [f"{number}:{group}" for group in range(first, first + work.together)]
        began = time.perf_counter()
        pipeline = connection.pipeline(transaction=False)
        for group in groups:
            for k in range(GROUP_SIZE):
                pipeline.set(f"{group}:{k}", payload)
        pipeline.execute()
        found.append(time.perf_counter() - began)
        for group in groups:
            handover.room.acquire()
            handover.names.put(group)
    durations.put(found)


def raw_consumer(url: str, batches: int, times: Connection, handover: Handover) -> None:
    """GET a batch of payloads in one pipeline, then delete them."""
    keep_freed_memory()
    connection = redis.Redis.from_url(url)
    for _ in range(batches):
        groups = [handover.names.get() for _ in range(BATCH_GROUPS)]
        keys = [f"{group}:{k}" for group in groups for k in range(GROUP_SIZE)]
        pipeline = connection.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        assert all(len(payload) == PAYLOAD_BYTES for payload in pipeline.execute())
        connection.delete(*keys)
        for _ in groups:
            handover.room.release()
        times.send(time.perf_counter())


def raw_setter(url: str, number: int, work: Work, durations: "SimpleQueue[list[float]]") -> None:
    """SET one payload at a time, over and over the same thousand keys."""
    keep_freed_memory()
    connection, payload = redis.Redis.from_url(url), example_result().SerializeToString()
    found: list[float] = []
    for n, pause_seconds in zip(range(work.groups), _pauses(work), strict=False):
        time.sleep(pause_seconds)
        began = time.perf_counter()
        connection.set(f"{number}:{n % 1000}", payload)
        found.append(time.perf_counter() - began)
    durations.put(found)


def _pauses(work: Work) -> Iterator[float]:
    """Seconds to wait before each put: they come at random times, as often as the work says."""
    chance, due = random.Random(), time.perf_counter()
    while True:
        if work.puts_per_second:
            due += chance.expovariate(work.puts_per_second)
        yield max(0.0, due - time.perf_counter())
