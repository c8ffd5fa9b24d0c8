"""A replica that loads a version from the shared folder during weight syncs serves the newest version."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from torch import Tensor

from nexrl.errors import UnavailableError
from nexrl.rpc.client import connect
from nexrl.v1 import policy_pb2
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.v1.weight_sync_service_pb2_grpc import add_WeightSyncServiceServicer_to_server
from nexrl.weights.manifest import Manifest
from nexrl.weights.packing import Snapshot, tensor_specs
from nexrl.weights.published import PublishedVersions
from nexrl.weights.receiver import StagedWeights, WeightReceiver
from nexrl_inference import replica as replica_module
from nexrl_inference.replica import Replica
from nexrl_inference.requests import GenerationRequest, GenerationResult
from tests.support.patience import eventually
from tests.support.publishing import MODEL_TAG, TENSORS, packed

if TYPE_CHECKING:  # the generated class is abstract to type checkers only; a fake has the methods that are called
    from builtins import object as WeightSyncServiceServicer  # noqa: N812
else:
    from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceServicer


@dataclass
class Registry(WeightSyncServiceServicer):
    """A fake weight sync: answers with the committed version, and records all registrations."""

    committed: Manifest | None = None
    reported: list[tuple[int, str]] = field(default_factory=list)

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, context: Any) -> pb.RegisterReplicaResponse:
        self.reported.append((request.replica.policy_version, request.digest))
        if self.committed is None:
            return pb.RegisterReplicaResponse(committed_version=-1, lease_seconds=0.1)
        version, digest = self.committed.policy_version, self.committed.digest
        return pb.RegisterReplicaResponse(committed_version=version, committed_digest=digest, lease_seconds=0.1)

    async def DeregisterReplica(
        self, request: pb.DeregisterReplicaRequest, context: Any
    ) -> pb.DeregisterReplicaResponse:
        return pb.DeregisterReplicaResponse()


class SlowEngine:
    """Loads when `may_load` is set, and fails as often as `failures` says."""

    active_rows = 0
    waiting_requests = 0

    def __init__(self) -> None:
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.is_loading = asyncio.Event()
        self.failures = 0
        self.loaded: list[int] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        raise NotImplementedError

    async def load(self, weights: StagedWeights) -> None:
        self.is_loading.set()
        await self.may_load.wait()
        if self.failures:
            self.failures -= 1
            raise UnavailableError("the engine failed")
        self.loaded.append(weights.policy_version)


class SlowStorage(PublishedVersions):
    """Reads when `may_read` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MODEL_TAG)
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()
        self.has_read = threading.Event()

    def read(self, manifest: Manifest, buffers: Sequence[Tensor]) -> None:
        self.is_reading.set()
        assert self.may_read.wait(30)
        super().read(manifest, buffers)
        self.has_read.set()


class PreparedReceiver(WeightReceiver):
    """Holds weights as if a broadcast had brought them."""

    def stage(self, weights: Snapshot) -> str:
        sync_id = f"sync-{weights.manifest.policy_version}"
        self._staged = StagedWeights(sync_id, weights.manifest, weights.buffers, weights.manifest.digest)
        return sync_id


class Deployed:
    """A registered replica, and everything around it."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self.registry, self.storage, self.engine = registry, SlowStorage(path), SlowEngine()
        self.receiver = PreparedReceiver(tensor_specs(TENSORS))
        identity = policy_pb2.Replica(replica_id="replica", address="127.0.0.1:1")
        self.replica = Replica(self.engine, self.receiver, identity, self.storage)

    def publish(self, policy_version: int) -> None:
        """A version that is in the folder, and committed."""
        weights = packed(policy_version, shift=policy_version)
        self.storage.write(weights)
        self.registry.committed = weights.manifest

    async def sync(self, policy_version: int) -> None:
        """A sync brings a version here and commits it."""
        weights = packed(policy_version, shift=policy_version)
        await self.replica.commit(self.receiver.stage(weights))
        self.registry.committed = weights.manifest

    async def until_reported(self, policy_version: int) -> None:
        """Wait until the replica has registered again, with that version and its digest."""
        digest = packed(policy_version, shift=policy_version).manifest.digest
        seen = len(self.registry.reported)
        await eventually(lambda: (policy_version, digest) in self.registry.reported[seen:])


@pytest.fixture
async def deployed(tmp_path: Path) -> AsyncIterator[Deployed]:
    registry = Registry()
    server = grpc.aio.server()
    add_WeightSyncServiceServicer_to_server(registry, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    deployed = Deployed(tmp_path, registry)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(connect(f"127.0.0.1:{port}"))
        registered = asyncio.create_task(deployed.replica.keep_registered(channel, MODEL_TAG))
        yield deployed
        deployed.storage.may_read.set()
        registered.cancel()
        await asyncio.wait([registered])


async def test_a_replica_without_weights_takes_the_committed_version(deployed: Deployed) -> None:
    deployed.publish(4)
    await deployed.until_reported(4)
    await deployed.replica.wait_committed()
    assert deployed.engine.loaded == [4]


async def test_only_the_committed_bytes_are_taken(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "PAUSE_SECONDS", 0.0)
    deployed.storage.write(packed(4, shift=1))  # of a trainer that was here before
    deployed.storage.write(packed(5, shift=5))  # not committed
    deployed.registry.committed = packed(4, shift=4).manifest
    seen = len(deployed.registry.reported)
    await eventually(lambda: len(deployed.registry.reported) > seen + 3)
    assert deployed.engine.loaded == []
    deployed.publish(4)
    await deployed.until_reported(4)


async def test_a_sync_that_is_faster_than_the_folder_wins(deployed: Deployed) -> None:
    deployed.storage.may_read.clear()
    deployed.publish(4)
    await asyncio.to_thread(deployed.storage.is_reading.wait)
    await deployed.sync(5)
    deployed.storage.may_read.set()
    await asyncio.to_thread(deployed.storage.has_read.wait)
    await deployed.until_reported(5)
    assert deployed.engine.loaded == [5]


async def test_a_sync_that_commits_while_a_version_is_loaded_from_the_folder_comes_after_it(deployed: Deployed) -> None:
    deployed.engine.may_load.clear()
    deployed.publish(4)
    await deployed.engine.is_loading.wait()
    syncing = asyncio.create_task(deployed.sync(5))
    assert deployed.replica.state().policy_version == -1
    deployed.engine.may_load.set()
    await syncing
    assert deployed.engine.loaded == [4, 5]
    await deployed.until_reported(5)


async def test_a_version_that_was_forgotten_while_it_was_read_is_not_served(deployed: Deployed) -> None:
    deployed.storage.may_read.clear()
    deployed.publish(9)
    await asyncio.to_thread(deployed.storage.is_reading.wait)
    await deployed.sync(3)  # of a trainer whose ledger has lost the steps to version 9
    deployed.storage.may_read.set()
    await asyncio.to_thread(deployed.storage.has_read.wait)
    await deployed.until_reported(3)
    assert deployed.engine.loaded == [3]


async def test_a_commit_that_its_caller_gave_up_is_finished(deployed: Deployed) -> None:
    deployed.engine.may_load.clear()
    syncing = asyncio.create_task(deployed.sync(5))
    await deployed.engine.is_loading.wait()
    syncing.cancel()
    await asyncio.wait([syncing])
    deployed.engine.may_load.set()
    await deployed.until_reported(5)
    assert deployed.engine.loaded == [5]


async def test_a_load_that_fails_is_not_reported_and_tried_again(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "PAUSE_SECONDS", 0.0)
    deployed.engine.failures = 2
    deployed.publish(4)
    await deployed.until_reported(4)
    assert deployed.engine.loaded == [4]
    assert {version for version, _ in deployed.registry.reported} == {-1, 4}
