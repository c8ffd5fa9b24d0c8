"""One replica: an engine, the weights that it has received, and its registration with weight sync."""

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

import grpc
from prometheus_client import Counter, Gauge

from nexrl.errors import NexrlError, UnavailableError
from nexrl.rpc.client import call, new_request_id
from nexrl.v1 import policy_pb2
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl.weights.manifest import Manifest
from nexrl.weights.metrics import POLICY_VERSION
from nexrl.weights.published import PublishedVersions
from nexrl.weights.receiver import NO_VERSION, StagedWeights, WeightReceiver
from nexrl.weights.rendezvous import Rendezvous
from nexrl_inference.requests import GenerationRequest, GenerationResult

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.2
PAUSE_SECONDS = 1.0
"""Pause after a failed attempt to read a version from the shared folder."""

RUNNING = Gauge("nexrl_inference_inflight_requests", "Completions being generated.")
TOKENS = Counter("nexrl_inference_tokens_total", "Tokens generated.")


class Engine(Protocol):
    """Samples completions. Each backend has one."""

    @property
    def active_rows(self) -> int:
        """Completions being generated."""

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for a free row."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample completions; see `Replica.generate`."""

    async def load(self, weights: StagedWeights) -> None:
        """Serve `weights` from the next decode step on. After an error it serves nothing until a load succeeds."""


class Replica:
    """Serves a version only after its commit and while the engine holds it.

    The engine loads one version at a time; the receiver reports a version as served only when it is loaded. A version
    that a sync commits is always loaded. A version from the shared folder is loaded only if no sync has delivered
    another one since weight sync named it.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: WeightReceiver,
        identity: policy_pb2.Replica,
        published: PublishedVersions | None = None,
    ) -> None:
        """`published`: the folder shared with the trainer, from which the replica catches up; None if there is none."""
        self._engine = engine
        self._receiver = receiver
        self._identity = identity
        self._published = published
        self._loading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._first_commit = asyncio.Event()
        RUNNING.set_function(lambda: engine.active_rows)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample completions. Raises what the engine raises; FailedPreconditionError before a version is committed."""
        result = await self._engine.generate(request)
        TOKENS.inc(sum(len(completion.token_ids) for completion in result.completions))
        return result

    async def receive(self, sync_id: str, rendezvous: Rendezvous, manifest: Manifest) -> str:
        """Receive a version beside the one being served. Returns the digest of what arrived."""
        try:
            return await self._receiver.receive(sync_id, rendezvous, manifest)
        except UnavailableError:
            # It was evicted from the group: register again at once. Not if the weights do not fit the model: they
            # will not fit at the next attempt either, and that attempt must continue without this replica.
            self._changed.set()
            raise

    async def commit(self, sync_id: str) -> None:
        """Serve the version that `sync_id` delivered, from the next decode step on. Idempotent."""
        # In a task of its own: a caller that disconnects must not interrupt a load.
        await asyncio.shield(asyncio.create_task(self._commit(sync_id)))

    async def serve(self, weights: StagedWeights) -> None:
        """Serve `weights` from the next decode step on."""
        async with self._loading:
            await self._load(weights)

    def state(self) -> policy_pb2.Replica:
        """Return the replica as it sees itself."""
        state = policy_pb2.Replica()
        state.CopyFrom(self._identity)
        state.policy_version = self._receiver.policy_version
        state.ready = self._receiver.policy_version >= 0
        return state

    @property
    def digest(self) -> str:
        """Digest of what it serves; empty while it serves nothing."""
        return self._receiver.digest

    @property
    def load(self) -> tuple[int, int]:
        """Completions being generated, and requests that wait for a free row."""
        return self._engine.active_rows, self._engine.waiting_requests

    async def wait_committed(self) -> None:
        """Wait until the first version is served."""
        await self._first_commit.wait()

    async def keep_registered(self, channel: grpc.aio.Channel, model_tag: str) -> None:
        """Keep the replica registered until the task is cancelled, then deregister it.

        If the committed version is newer than the served one, it is read from the shared folder, if there is one.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._renew(channel, model_tag, tasks)
        finally:
            request = pb.DeregisterReplicaRequest(
                request_id=new_request_id(), model_tag=model_tag, replica_id=self._identity.replica_id
            )
            await call(WeightSyncServiceStub(channel).DeregisterReplica, request, timeout_seconds=1.0)

    async def _renew(self, channel: grpc.aio.Channel, model_tag: str, tasks: asyncio.TaskGroup) -> None:
        catching_up: asyncio.Task[None] | None = None
        while True:
            self._changed.clear()
            served = self.digest
            answer = await self._register(channel, model_tag)
            if self._is_behind(answer) and (catching_up is None or catching_up.done()):
                # In a task beside this loop: the lease must not end because the storage is slow.
                catching_up = tasks.create_task(self._catch_up(answer, served))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), answer.lease_seconds / 3)

    async def _commit(self, sync_id: str) -> None:
        async with self._loading:
            staged = await self._receiver.take(sync_id)
            if staged is not None and self._serves(staged):
                self._receiver.mark_served(staged)  # it was sent again for another replica: load nothing
            elif staged is not None:
                await self._load(staged)

    def _serves(self, weights: StagedWeights) -> bool:
        return (weights.policy_version, weights.digest) == (self._receiver.policy_version, self._receiver.digest)

    async def _load(self, weights: StagedWeights) -> None:
        try:
            await self._engine.load(weights)
        except BaseException:
            self._receiver.mark_lost(weights)
            self._changed.set()
            raise
        self._receiver.mark_served(weights)
        POLICY_VERSION.labels("inference").set(weights.policy_version)
        self._first_commit.set()

    def _is_behind(self, answer: pb.RegisterReplicaResponse) -> bool:
        return self._published is not None and answer.committed_version > self._receiver.policy_version

    async def _catch_up(self, answer: pb.RegisterReplicaResponse, served: str) -> None:
        """Serve the committed version from the shared folder, unless another digest than `served` is served by then."""
        assert self._published is not None
        policy_version = answer.committed_version
        try:
            weights = await self._receiver.read(self._published, policy_version, answer.committed_digest)
            async with self._loading:
                if self.digest != served:  # a sync was faster; its version is at least as new
                    return
                await self._load(weights)
        except NexrlError as error:
            log.warning("version %d was not read from the shared folder: %s", policy_version, error)
            await asyncio.sleep(PAUSE_SECONDS)  # the next attempt begins after this task
        else:
            log.info("version %d was read from the shared folder", policy_version)
            self._changed.set()

    async def _register(self, channel: grpc.aio.Channel, model_tag: str) -> pb.RegisterReplicaResponse:
        request = pb.RegisterReplicaRequest(
            request_id=new_request_id(), model_tag=model_tag, replica=self.state(), digest=self.digest
        )
        try:
            return await call(WeightSyncServiceStub(channel).RegisterReplica, request, timeout_seconds=CALL_SECONDS)
        except NexrlError as error:
            log.warning("registration: %s", error)
            return pb.RegisterReplicaResponse(committed_version=NO_VERSION, lease_seconds=3 * RETRY_SECONDS)
