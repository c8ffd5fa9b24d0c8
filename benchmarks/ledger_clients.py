"""The client processes of `ledger.py`: producers and the consumer, of our pool and of raw Redis.

Each function runs in a process of its own. A producer reports how long each of its puts took, the consumer when each
batch was acknowledged (seconds of one monotonic clock).
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Semaphore

import redis

from nexrl.client import RolloutClient
from nexrl.policy import Policy
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceStub
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub

TAG = "default"
GROUP_SIZE = 8
BATCH_SIZE = 64
PAYLOAD_BYTES = 8192
TOKENS = 1024
PROMPT_TOKENS = 256
FIRST_TOKEN, LAST_TOKEN = 128, 515  # two bytes each on the wire, as most ids of a large vocabulary
CHECKPOINT_STEPS = 10
CALL_SECONDS = 60.0


@dataclass(frozen=True)
class Work:
    """What one producer does: `groups` puts, one every `interval_seconds` (0: as fast as it can)."""

    groups: int
    interval_seconds: float = 0.0
    together: int = 1
    """Groups handed in at the same time."""


def example_result() -> pb.SampleResult:
    """A sample of 1,024 tokens that takes 8 KiB on the wire."""
    chance = random.Random(0)
    completion_tokens = TOKENS - PROMPT_TOKENS
    trajectory = pb.Trajectory(
        token_ids=[chance.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(TOKENS)],
        loss_mask=[False] * PROMPT_TOKENS + [True] * completion_tokens,
        logprobs=[0.0] * PROMPT_TOKENS + [-chance.expovariate(1.0) for _ in range(completion_tokens)],
        spans=[pb.PolicySpan(start=PROMPT_TOKENS, end=TOKENS, policy_version=0)],
        reward=1.0,
        reward_components={"exact": 1.0, "format": 1.0},
        metadata={"data_source": "mock", "attempt": "first"},
        prompt="Sort these digits.",
        finish_reason="stop",
    )
    result = pb.SampleResult(sample_id="100000.0", attempt=1, verdict=pb.VERDICT_OK, trajectories=[trajectory])
    missing = PAYLOAD_BYTES - result.ByteSize() - 8  # the new field's own tag and length, and longer lengths around it
    result.trajectories[0].response = "x" * missing
    result.trajectories[0].response += "x" * (PAYLOAD_BYTES - result.ByteSize())
    return result


def pool_producer(address: str, number: int, work: Work, durations: "SimpleQueue[list[float]]") -> None:
    """Lease tasks, put one group a call."""
    durations.put(asyncio.run(_produce(address, number, work)))


async def _produce(address: str, number: int, work: Work) -> list[float]:
    durations: list[float] = []
    async with connect(address) as channel:
        client = RolloutClient(channel, Policy(channel), worker_id=f"producer-{number}")
        results = [[example_result() for _ in range(GROUP_SIZE)] for _ in range(work.together)]
        ticks = _ticks(work)
        remaining = work.groups
        while remaining:
            leases = (await client.lease(BATCH_SIZE)).leases[:]
            remaining -= len(leases)
            for first in range(0, len(leases), work.together):
                await asyncio.sleep(next(ticks))
                began = time.perf_counter()
                together = leases[first : first + work.together]
                await asyncio.gather(*(_put(client, lease, result) for lease, result in zip(together, results, strict=False)))
                durations.append(time.perf_counter() - began)
    return durations


async def _put(client: RolloutClient, lease: pb.TaskLease, results: Sequence[pb.SampleResult]) -> None:
    for sample, result in zip(lease.samples, results, strict=True):
        result.sample_id, result.attempt = sample.sample_id, sample.attempt
    outcomes = await client.put(pb.PURPOSE_TRAINING, results)
    assert outcomes == [pb.PUT_OUTCOME_ACCEPTED] * GROUP_SIZE


def pool_consumer(address: str, batches: int, times: "SimpleQueue[list[float]]") -> None:
    """Lease batches, make train batches of them, train them, and commit checkpoints."""
    times.put(asyncio.run(_consume(address, batches)))


async def _consume(address: str, batches: int) -> list[float]:
    times: list[float] = []
    async with connect(address) as channel:
        pool, train = TrajectoryPoolServiceStub(channel), TrainBatchPoolServiceStub(channel)
        resume = train_pb.ResumeFromCheckpointRequest(request_id=new_request_id(), model_tag=TAG)
        incarnation = (await call(train.ResumeFromCheckpoint, resume, timeout_seconds=CALL_SECONDS)).incarnation
        for step in range(batches):
            lease = await _lease_batch(pool)
            samples = [sample.sample_id for group in lease.groups for sample in group.samples]
            assert len(samples) == BATCH_SIZE
            batch = train_pb.TrainBatch(batch_id=step, model_tag=TAG, sample_ids=samples)
            put = train_pb.PutTrainBatchRequest(
                request_id=new_request_id(), train_batch=batch, batch_attempt=lease.attempt
            )
            await call(train.PutTrainBatch, put, timeout_seconds=CALL_SECONDS)
            ack = train_pb.AckTrainBatchRequest(
                request_id=new_request_id(), model_tag=TAG, step=step, incarnation=incarnation, sample_ids=samples
            )
            await call(train.AckTrainBatch, ack, timeout_seconds=CALL_SECONDS)
            times.append(time.perf_counter())
            if (step + 1) % CHECKPOINT_STEPS == 0:
                await _commit(pool, train, step + 1, incarnation)
    return times


async def _lease_batch(pool: "TrajectoryPoolServiceStub") -> pool_pb.BatchLease:
    while True:
        request = pool_pb.LeaseBatchRequest(
            request_id=new_request_id(), model_tag=TAG, worker_id="consumer", wait_seconds=20.0
        )
        answer = await call(pool.LeaseBatch, request, timeout_seconds=CALL_SECONDS)
        if answer.HasField("lease"):
            return answer.lease


async def _commit(
    pool: "TrajectoryPoolServiceStub", train: "TrainBatchPoolServiceStub", steps: int, incarnation: int
) -> None:
    version = pool_pb.SetPolicyVersionRequest(request_id=new_request_id(), model_tag=TAG, policy_version=steps)
    await call(pool.SetPolicyVersion, version, timeout_seconds=CALL_SECONDS)
    commit = train_pb.CommitCheckpointRequest(
        request_id=new_request_id(), model_tag=TAG, steps=steps, incarnation=incarnation
    )
    await call(train.CommitCheckpoint, commit, timeout_seconds=CALL_SECONDS)


def raw_producer(
    url: str, number: int, work: Work, durations: "SimpleQueue[list[float]]", names: "SimpleQueue[str]", room: Semaphore
) -> None:
    """SET a group of payloads in one pipeline, then tell the consumer its name; `room` bounds how far it is ahead."""
    connection, payload = redis.Redis.from_url(url), example_result().SerializeToString()
    found: list[float] = []
    ticks = _ticks(work)
    for n in range(0, work.groups, work.together):
        time.sleep(next(ticks))
        began = time.perf_counter()
        pipeline = connection.pipeline(transaction=False)
        for group in range(n, n + work.together):
            for k in range(GROUP_SIZE):
                pipeline.set(f"{number}:{group}:{k}", payload)
        pipeline.execute()
        found.append(time.perf_counter() - began)
        for group in range(n, n + work.together):
            room.acquire()
            names.put(f"{number}:{group}")
    durations.put(found)


def raw_consumer(
    url: str, batches: int, times: "SimpleQueue[list[float]]", names: "SimpleQueue[str]", room: Semaphore
) -> None:
    """GET 64 payloads in one pipeline, then delete them."""
    connection = redis.Redis.from_url(url)
    found: list[float] = []
    for _ in range(batches):
        groups = [names.get() for _ in range(BATCH_SIZE // GROUP_SIZE)]
        keys = [f"{group}:{k}" for group in groups for k in range(GROUP_SIZE)]
        pipeline = connection.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        assert all(len(payload) == PAYLOAD_BYTES for payload in pipeline.execute())
        connection.delete(*keys)
        for _ in groups:
            room.release()
        found.append(time.perf_counter())
    times.put(found)


def raw_setter(url: str, number: int, work: Work, durations: "SimpleQueue[list[float]]") -> None:
    """SET one payload at a time."""
    connection, payload = redis.Redis.from_url(url), example_result().SerializeToString()
    found: list[float] = []
    for n, pause_seconds in zip(range(work.groups), _ticks(work), strict=False):
        time.sleep(pause_seconds)
        began = time.perf_counter()
        connection.set(f"{number}:{n % 1000}", payload)
        found.append(time.perf_counter() - began)
    durations.put(found)


def _ticks(work: Work) -> Iterator[float]:
    """How long to wait before each put, so that they come at random, `interval_seconds` apart on average."""
    chance, due = random.Random(), time.perf_counter()
    while True:
        due += chance.expovariate(1.0) * work.interval_seconds
        yield max(0.0, due - time.perf_counter())
