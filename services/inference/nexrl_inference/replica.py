"""One replica: an engine, the weights it has received, and its place among the replicas of its model tag."""

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

import grpc
from prometheus_client import Counter, Gauge

from nexrl.errors import NexrlError
from nexrl.rpc.client import call, new_request_id
from nexrl.v1 import policy_pb2
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl.weights.manifest import Manifest
from nexrl.weights.metrics import POLICY_VERSION
from nexrl.weights.receiver import StagedWeights, WeightReceiver
from nexrl.weights.rendezvous import Rendezvous
from nexrl_inference.requests import GenerationRequest, GenerationResult

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.2

RUNNING = Gauge("nexrl_inference_inflight_requests", "Completions being generated.")
TOKENS = Counter("nexrl_inference_tokens_total", "Tokens generated.")


class Engine(Protocol):
    """What samples: the built-in engine in its thread, or vLLM."""

    @property
    def active_rows(self) -> int:
        """Completions being generated."""

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for a place."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample completions; see `Replica.generate`."""

    async def load(self, weights: StagedWeights) -> None:
        """Serve `weights` from the next decode step on. After an error it serves nothing until a load succeeds."""


class Replica:
    """Serves a version only after it was committed and while it holds it."""

    def __init__(self, engine: Engine, receiver: WeightReceiver, identity: policy_pb2.Replica) -> None:
        self._engine = engine
        self._receiver = receiver
        self._identity = identity
        self._changed = asyncio.Event()
        self._first_commit = asyncio.Event()
        RUNNING.set_function(lambda: engine.active_rows)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample completions. Raises what the engine raises; FailedPreconditionError before a version is committed."""
        result = await self._engine.generate(request)
        TOKENS.inc(sum(len(completion.token_ids) for completion in result.completions))
        return result

    async def receive(self, sync_id: str, rendezvous: Rendezvous, manifest: Manifest) -> str:
        """Receive a version beside the one being served; gives the digest of what arrived."""
        try:
            return await self._receiver.receive(sync_id, rendezvous, manifest)
        except NexrlError:
            self._changed.set()  # it was put out of the group: register again at once
            raise

    async def commit(self, sync_id: str) -> None:
        """Serve the version that `sync_id` brought, from the next decode step on. Once more is once."""
        staged = await self._receiver.take(sync_id)
        if staged is not None:
            await self.serve(staged)

    async def serve(self, weights: StagedWeights) -> None:
        """Serve `weights` from the next decode step on."""
        try:
            await self._engine.load(weights)
        except NexrlError:
            self._receiver.mark_lost()
            self._changed.set()
            raise
        self._receiver.mark_served(weights)
        POLICY_VERSION.labels("inference").set(weights.policy_version)
        self._first_commit.set()

    def state(self) -> policy_pb2.Replica:
        """The replica as it sees itself."""
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
        """Completions being generated, and requests that wait for a place."""
        return self._engine.active_rows, self._engine.waiting_requests

    async def wait_committed(self) -> None:
        """Return when a first version is served."""
        await self._first_commit.wait()

    async def keep_registered(self, channel: grpc.aio.Channel, model_tag: str) -> None:
        """Hold a place among the replicas for as long as the task lives, and give it up at its end."""
        try:
            while True:
                self._changed.clear()
                next_seconds = await self._register(channel, model_tag)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), next_seconds)
        finally:
            request = pb.DeregisterReplicaRequest(
                request_id=new_request_id(), model_tag=model_tag, replica_id=self._identity.replica_id
            )
            await call(WeightSyncServiceStub(channel).DeregisterReplica, request, timeout_seconds=1.0)

    async def _register(self, channel: grpc.aio.Channel, model_tag: str) -> float:
        request = pb.RegisterReplicaRequest(
            request_id=new_request_id(), model_tag=model_tag, replica=self.state(), digest=self.digest
        )
        try:
            answer = await call(WeightSyncServiceStub(channel).RegisterReplica, request, timeout_seconds=CALL_SECONDS)
        except NexrlError as error:
            log.warning("registration: %s", error)
            return RETRY_SECONDS
        return answer.lease_seconds / 3
