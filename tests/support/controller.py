"""What the controller's tests share: a clock, an experiment, a running controller, and the services that it calls."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from nexrl.errors import NotFoundError
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.spec import Experiment
from nexrl.v1 import validator_service_pb2 as validator_pb
from nexrl.v1 import weight_sync_service_pb2 as weight_sync_pb
from nexrl.v1.policy_pb2 import Replica
from nexrl_controller.state import Rules, State

if TYPE_CHECKING:  # the generated classes are abstract to type checkers only; a fake has the methods that are called
    from builtins import object as ValidatorServiceServicer  # noqa: N812
    from builtins import object as WeightSyncServiceServicer  # noqa: N812
else:
    from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceServicer
    from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class Clock:
    """Unix seconds that pass only when told."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def experiment(name: str = "test", **spec: object) -> Experiment:
    """A small experiment of four steps; `spec` replaces whole sections, in the spelling of a file."""
    sections: dict[str, object] = {
        "model": {"scratch": {"alphabet": "0123456789"}},
        "data": {"type": "mock"},
        "rollout": {"type": "simple", "maxNewTokens": 8},
        "inference": {"maxTokensPerRow": 32},
        "trainer": {"steps": 4},
        "validation": {"data": {"type": "mock"}, "timeoutSeconds": 30},
        **spec,
    }
    document = {
        "apiVersion": "nexrl.dev/v1alpha1",
        "kind": "Experiment",
        "metadata": {"name": name},
        "spec": {key: section for key, section in sections.items() if section is not None},
    }
    return Experiment.model_validate_json(json.dumps(document))


def rules(**spec: object) -> Rules:
    """The rules of that experiment."""
    return Rules.of(experiment("test", **spec).spec)


def new_state() -> State:
    """The state of an experiment that was just accepted."""
    return State(start_unix_seconds=1_000_000.0)


@asynccontextmanager
async def served(*services: tuple[Any, object]) -> AsyncIterator[str]:
    """The address of a real server of `services`: pairs of a generated add_..._to_server and a servicer."""
    server = grpc.aio.server(interceptors=[EdgeInterceptor()])
    for register, servicer in services:
        register(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class FakeWeightSync(WeightSyncServiceServicer):
    """Holds the given versions for validation, one after the other, each until EndValidationHold."""

    def __init__(self, versions: Sequence[int], committed_version: int = -1) -> None:
        self.waiting = list(versions)
        self.committed_version = committed_version
        self.is_released = asyncio.Event()

    async def GetWeightSyncState(
        self, request: weight_sync_pb.GetWeightSyncStateRequest, context: Context
    ) -> weight_sync_pb.GetWeightSyncStateResponse:
        return weight_sync_pb.GetWeightSyncStateResponse(
            committed_version=self.committed_version, waiting_for_validation=bool(self.waiting)
        )

    async def WaitForValidation(
        self, request: weight_sync_pb.WaitForValidationRequest, context: Context
    ) -> weight_sync_pb.WaitForValidationResponse:
        if not self.waiting:
            await asyncio.Event().wait()  # nothing will ever be due again
        return weight_sync_pb.WaitForValidationResponse(waiting=True, policy_version=self.waiting[0])

    async def EndValidationHold(
        self, request: weight_sync_pb.EndValidationHoldRequest, context: Context
    ) -> weight_sync_pb.EndValidationHoldResponse:
        assert self.waiting.pop(0) == request.policy_version
        self.is_released.set()
        return weight_sync_pb.EndValidationHoldResponse()

    async def WatchReplicas(
        self, request: weight_sync_pb.WatchReplicasRequest, context: Context
    ) -> AsyncIterator[weight_sync_pb.WatchReplicasResponse]:
        for version in (-1, 0, 1):
            replicas = [Replica(replica_id="inference-0", policy_version=version, ready=version >= 0)]
            yield weight_sync_pb.WatchReplicasResponse(committed_version=version, replicas=replicas)
        await asyncio.Event().wait()


class FakeValidator(ValidatorServiceServicer):
    """Measures a version at once; never ends when `is_stuck`; refuses when `refusal` is given; forgets the first round
    if it `forgets`. Keeps the calls."""

    def __init__(self, *, is_stuck: bool = False, refusal: Exception | None = None, forgets: bool = False) -> None:
        self.calls: list[str] = []
        self._is_stuck = is_stuck
        self._forgets = forgets
        self._refusal = refusal

    async def StartValidation(
        self, request: validator_pb.StartValidationRequest, context: Context
    ) -> validator_pb.StartValidationResponse:
        self.calls.append(f"start {request.policy_version}")
        if self._refusal is not None:
            raise self._refusal
        return validator_pb.StartValidationResponse(samples=2)

    async def WaitValidation(
        self, request: validator_pb.WaitValidationRequest, context: Context
    ) -> validator_pb.WaitValidationResponse:
        if self._forgets and len(self.calls) == 1:
            raise NotFoundError("no such round")
        if self._is_stuck:
            await asyncio.sleep(request.wait_seconds)
            return validator_pb.WaitValidationResponse(complete=False)
        return validator_pb.WaitValidationResponse(complete=True, metrics={"val/reward": 0.5, "val/num_samples": 2})

    async def EndValidation(
        self, request: validator_pb.EndValidationRequest, context: Context
    ) -> validator_pb.EndValidationResponse:
        self.calls.append(f"end {request.policy_version}")
        return validator_pb.EndValidationResponse()
