"""Runs a weight-sync service in this process and replicas as processes. Provides example weights."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import torch
from torch import Tensor

from nexrl.rpc.client import connect
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.store import Redis, key_prefix
from nexrl.v1 import policy_pb2
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub, add_WeightSyncServiceServicer_to_server
from nexrl.weights.gpu import Gpu
from nexrl.weights.manifest import TensorSpec
from nexrl.weights.packing import Snapshot, snapshot, tensor_specs
from nexrl.weights.published import PublishedVersions
from nexrl.weights.publisher import TakeSnapshot, WeightPublisher
from nexrl.weights.transport import Sender
from nexrl_weight_sync.coordinator import Coordinator
from nexrl_weight_sync.records import Rules
from nexrl_weight_sync.replicas import ReplicaClients
from nexrl_weight_sync.service import WeightSyncServicer
from nexrl_weight_sync.store import WeightSyncStore
from nexrl_weight_sync.weight_sync import View, WeightSync
from tests.support import replica_process
from tests.support.patience import Patience, PatienceError, usual

if TYPE_CHECKING:
    from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceAsyncStub

MODEL_TAG = "default"
LEASE_SECONDS = 30.0
"""Long, because a replica that gets no CPU time for so long is put out."""
SHORT_LEASE_SECONDS = 3.0
"""For tests of the end of a lease, where a replica is stopped for good. All replicas renew as often as it requires."""
TIMEOUT_SECONDS = 120.0
"""Above LEASE_SECONDS, so a sync that waits for a dead replica ends with its lease, which is logged."""
BUCKET_BYTES = 64 * 1024


def taken(named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> TakeSnapshot:
    """Return what a publisher is given to publish these tensors."""

    async def take(bucket_bytes: int, replaced: Snapshot | None, device: torch.device) -> Snapshot:
        return await asyncio.to_thread(
            snapshot,
            named_tensors,
            policy_version=policy_version,
            bucket_bytes=bucket_bytes,
            replaced=replaced,
            device=device,
        )

    return take


def example_tensors(seed: int, *, nbytes: int = 1_000_000) -> list[tuple[str, Tensor]]:
    """Return the weights of a small model: about `nbytes` bytes, with mixed types and shapes."""
    generator = torch.Generator().manual_seed(seed)
    rows = nbytes // 6000
    return [
        ("embed.weight", torch.randn(rows, 1000, generator=generator)),
        ("head.weight", torch.randn(rows, 1000, generator=generator).to(torch.bfloat16)),
        ("norm.weight", torch.randn(7, generator=generator)),
        ("scale", torch.randn((), generator=generator)),
        ("steps", torch.tensor([seed], dtype=torch.int64)),
    ]


def rules(**changes: object) -> Rules:
    """Return rules of mode sync without validation. `changes` replaces some of them."""
    settings: dict[str, object] = {
        "max_lag_steps": 0,
        "lease_seconds": LEASE_SECONDS,
        "sync_seconds": 2 * TIMEOUT_SECONDS,
        "hold_seconds": 60.0,
        "is_due": lambda policy_version: False,
    }
    return Rules(**(settings | changes))  # type: ignore[arg-type]


# Only one process imports torch. The replicas are forks of it.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.replica_process"])


class ReplicaProcess:
    """A process that runs the replica of `tests.support.replica_process`."""

    def __init__(
        self, world: "World", identity: policy_pb2.Replica, behaviour: str, specs: tuple[TensorSpec, ...]
    ) -> None:
        arguments = (world.address, MODEL_TAG, identity, specs, behaviour, world.shared)
        self._process = _processes.Process(target=replica_process.main, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def freeze(self) -> None:
        """Suspend the process with SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
        self._process.kill()
        self._process.join()


@dataclass
class World:
    """The service, its address, and its replicas and publishers."""

    weight_sync: WeightSync
    address: str
    told: list[int] = field(default_factory=list)
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    shared: Path | None = None
    """The shared folder of all publishers and replicas that start after it is set."""
    _following: "dict[WeightPublisher, asyncio.Task[None]]" = field(default_factory=dict)

    async def replica(
        self, replica_id: str, behaviour: str = "sound", specs: tuple[TensorSpec, ...] = (), gpu: str = ""
    ) -> ReplicaProcess:
        """Start a replica, and wait until it is registered. Without `specs`, it serves the example model.

        With `gpu`, a UUID, it can use the stand-in of NCCL.
        """
        identity = policy_pb2.Replica(replica_id=replica_id, http_url="http://x", gpu=gpu)
        replica = ReplicaProcess(self, identity, behaviour, specs or tensor_specs(example_tensors(0)))
        self.closing.callback(replica.kill)
        await self.until(lambda view: any(found.replica_id == replica_id for found, _ in view.replicas))
        return replica

    async def publisher(self, *, bucket_bytes: int = BUCKET_BYTES, gpu: Gpu | None = None) -> WeightPublisher:
        """Start a trainer's publisher that follows the replicas."""
        channel = connect(self.address)
        self.closing.push_async_callback(channel.close)
        publisher = WeightPublisher(
            WeightSyncServiceStub(channel),
            Sender("127.0.0.1", gpu),
            model_tag=MODEL_TAG,
            bucket_bytes=bucket_bytes,
            timeout_seconds=TIMEOUT_SECONDS,
            published=PublishedVersions(self.shared, MODEL_TAG) if self.shared else None,
        )
        self._following[publisher] = follow = asyncio.create_task(publisher.keep_replicas_current())
        self.closing.push_async_callback(publisher.close)
        self.closing.push_async_callback(_ended, follow)
        return publisher

    async def trainer_dies(self, publisher: WeightPublisher) -> None:
        """Simulate the death of the trainer: `publisher` stops serving replicas."""
        await _ended(self._following[publisher])

    async def until(self, condition: Callable[[View], bool], patience: Patience = usual) -> View:
        """Wait until `condition` holds for the view of the replicas, and return that view."""
        views: list[View] = []

        async def watch() -> View:
            async for view in self.weight_sync.watch():
                views[:] = [view]
                if condition(view):
                    return view
            raise AssertionError("the watch ended")

        try:
            return await patience.finished(watch(), f"the replicas are as {condition.__qualname__} says")
        except PatienceError as error:
            error.add_note(f"last view: {views}")
            raise

    def stub(self) -> "WeightSyncServiceAsyncStub":
        """Return a client of the service."""
        channel = connect(self.address)
        self.closing.push_async_callback(channel.close)
        return WeightSyncServiceStub(channel)

    async def tell(self, policy_version: int) -> None:
        """Record a version that weight sync announces to the trajectory pool."""
        self.told.append(policy_version)


@asynccontextmanager
async def running_weight_sync(redis: Redis, experiment: str, its_rules: Rules, port: int = 0) -> AsyncIterator[World]:
    """Run weight sync of one model tag on a real socket, with its background tasks."""
    store = WeightSyncStore(redis, key_prefix(experiment, MODEL_TAG))
    coordinator = Coordinator(its_rules, await store.load(), time.monotonic())
    clients = ReplicaClients(timeout_seconds=TIMEOUT_SECONDS)
    weight_sync = WeightSync(coordinator, store, clients, timeout_seconds=TIMEOUT_SECONDS)
    servicer = WeightSyncServicer(
        weight_sync,
        model_tag=MODEL_TAG,
        mode="sync",
        lease_seconds=SHORT_LEASE_SECONDS,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    server = grpc.aio.server(interceptors=[EdgeInterceptor()])
    add_WeightSyncServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    world = World(weight_sync, f"127.0.0.1:{port}")
    background = [asyncio.create_task(weight_sync.expire()), asyncio.create_task(weight_sync.announce(world.tell))]
    try:
        async with world.closing:
            yield world
    finally:
        await weight_sync.stop()
        await server.stop(None)
        for task in background:
            await _ended(task)


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])
