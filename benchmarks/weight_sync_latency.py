"""Weight sync against one raw broadcast of the same bytes, one trainer and one replica, in one run.

    PYTHONPATH=. .venv/bin/python benchmarks/weight_sync_latency.py [MIB]

Trainer and weight sync share a process here; the replica, without an engine, is another. A publish is snapshot,
digest, prepare, broadcast, the replica's digest, commit in Redis and on the replica. CPU time is that of all
processes but Redis.
"""

import asyncio
import os
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from nexrl.store import connect_redis
from nexrl.weights.packing import allocate, snapshot, tensor_specs
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.transport import Receiver, Sender
from tests.support.redis import running_redis
from tests.support.weights import ReplicaProcess, example_tensors, rules, running_weight_sync, taken

ROUNDS = 40
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Measured:
    """A publish and a raw broadcast of the same bytes: medians; the CPU seconds are a mean."""

    publish_seconds: float
    publish_cpu_seconds: float
    raw_seconds: float


async def main(nbytes: int) -> None:
    """Print both times and their ratio."""
    torch.set_num_threads(1)
    tensors = example_tensors(0, nbytes=nbytes)
    measured = await measure(tensors, ROUNDS)
    size = sum(spec.nbytes for spec in tensor_specs(tensors)) / 2**20
    print(f"weights        {size:8.2f} MiB, 1 replica, median of {ROUNDS}, {os.cpu_count()} cores")
    print(
        f"publish        {1e3 * measured.publish_seconds:8.2f} ms, "
        f"{1e3 * measured.publish_cpu_seconds:.2f} ms CPU over all processes"
    )
    print(f"raw broadcast  {1e3 * measured.raw_seconds:8.2f} ms")
    print(f"ratio          {measured.publish_seconds / measured.raw_seconds:8.2f}")


async def measure(tensors: list[tuple[str, torch.Tensor]], rounds: int) -> Measured:
    """Return the times of publishing tensors on any device, each the median of so many rounds after a first."""
    with running_redis() as url:
        redis = await connect_redis(url)
        async with running_weight_sync(redis, f"bench-{uuid.uuid4().hex[:8]}", rules(lease_seconds=60.0)) as world:
            replica = await world.replica("a", specs=tensor_specs(tensors))
            publisher = await world.publisher(bucket_bytes=BUCKET_BYTES)
            versions = count()

            async def publish() -> None:
                await publisher.publish(taken(tensors, next(versions)))

            seconds, cpu_seconds = await timed(publish, replica, rounds)
        await redis.aclose()
    return Measured(seconds, cpu_seconds, await raw_broadcast_seconds(tensors, rounds))


async def timed(work: Callable[[], Awaitable[None]], replica: ReplicaProcess, rounds: int) -> tuple[float, float]:
    """Median seconds and mean CPU seconds of `work`, after a first time."""
    await work()
    cpu_began, times = cpu_seconds_of(replica), []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        times.append(time.perf_counter() - began)
    return statistics.median(times), (cpu_seconds_of(replica) - cpu_began) / rounds


def cpu_seconds_of(replica: ReplicaProcess) -> float:
    """CPU time so far of this process and the replica."""
    fields = Path(f"/proc/{replica.pid}/stat").read_text().rpartition(") ")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


async def raw_broadcast_seconds(tensors: list[tuple[str, torch.Tensor]], rounds: int) -> float:
    """Median seconds of one broadcast of the packed bytes, between two threads."""
    packed = snapshot(tensors, policy_version=0, bucket_bytes=BUCKET_BYTES)
    sender, receiver = Sender("127.0.0.1"), Receiver()
    ends = [Rendezvous(1, sender.host, sender.port, rank, 2, 60.0) for rank in (0, 1)]
    groups, times, buffers = (sender.group(ends[0]), receiver.group(ends[1])), [], allocate(packed.manifest)
    for _ in range(rounds + 1):
        began = time.perf_counter()
        await asyncio.gather(
            asyncio.to_thread(groups[0].send, packed.buffers), asyncio.to_thread(groups[1].receive, buffers)
        )
        times.append(time.perf_counter() - began)
    receiver.close_group()
    sender.close()
    return statistics.median(times[1:])


if __name__ == "__main__":
    asyncio.run(main(int(float(sys.argv[1] if len(sys.argv) > 1 else 2) * 2**20)))
