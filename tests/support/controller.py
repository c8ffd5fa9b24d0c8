"""Code that the controller's tests share: an experiment, a running controller, and fakes of the services it calls."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from nexrl.errors import NotFoundError
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.spec import Experiment
from nexrl.store import Redis
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as controller_pb
from nexrl.v1 import validator_service_pb2 as validator_pb
from nexrl.v1 import weight_sync_service_pb2 as weight_sync_pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub, add_ActivityServiceServicer_to_server
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub, add_ControllerServiceServicer_to_server
from nexrl.v1.policy_pb2 import Replica
from nexrl_controller.controller import Controller
from nexrl_controller.logging_backends import open_backends
from nexrl_controller.service import ActivityServicer, ControllerServicer
from nexrl_controller.state import Rules, State
from nexrl_controller.state_store import StateStore
from tests.support.clock import Clock
from tests.support.patience import LIMIT_SECONDS

if TYPE_CHECKING:  # to type checkers the generated classes are abstract; a fake has only the methods it needs
    from builtins import object as ValidatorServiceServicer  # noqa: N812
    from builtins import object as WeightSyncServiceServicer  # noqa: N812

    from nexrl.v1.activity_service_pb2_grpc import ActivityServiceAsyncStub
    from nexrl.v1.controller_service_pb2_grpc import ControllerServiceAsyncStub
else:
    from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceServicer
    from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


def experiment(name: str = "test", **spec: object) -> Experiment:
    """Return a small experiment of four steps. `spec` replaces whole sections; their names are those of the file."""
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
    """Return the rules of the experiment that `experiment` builds from this spec."""
    return Rules.of(experiment("test", **spec).spec)


def new_state() -> State:
    """Return the state of a new experiment."""
    return State(start_unix_seconds=1_000_000.0)


@asynccontextmanager
async def served(*services: tuple[Any, object]) -> AsyncIterator[str]:
    """Run a real gRPC server and yield its address.

    `services` are pairs of a generated function add_..._to_server and a servicer.
    """
    server = grpc.aio.server(interceptors=[EdgeInterceptor()])
    for register, servicer in services:
        register(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Deployed:
    """A running controller and its stubs."""

    def __init__(self, controller: Controller, channel: grpc.aio.Channel) -> None:
        self.controller = controller
        self.channel = channel
        self.lifecycle: ControllerServiceAsyncStub = ControllerServiceStub(channel)
        self.activity: ActivityServiceAsyncStub = ActivityServiceStub(channel)

    async def experiment(self) -> controller_pb.Experiment:
        """Return the experiment that the controller reports."""
        request = controller_pb.GetExperimentRequest()
        return (await call(self.lifecycle.GetExperiment, request, timeout_seconds=LIMIT_SECONDS)).experiment

    async def post(self, step: int, request_id: str = "", **metrics: float) -> None:
        """Post metrics. `__` in a name stands for `/`."""
        request = activity_pb.PostMetricsRequest(
            request_id=request_id or new_request_id(),
            step=step,
            metrics={k.replace("__", "/"): v for k, v in metrics.items()},
        )
        await call(self.activity.PostMetrics, request, timeout_seconds=LIMIT_SECONDS)

    async def heartbeat(self, name: str, role: str = "", work: Sequence[activity_pb.Work] = ()) -> float:
        """Send a module's heartbeat. Returns the interval that the controller wants."""
        module = activity_pb.Module(name=name, role=role or name, work=work, address="127.0.0.1:1")
        request = activity_pb.HeartbeatRequest(module=module)
        return (await call(self.activity.Heartbeat, request, timeout_seconds=LIMIT_SECONDS)).interval_seconds

    async def report_exit(
        self, component: str, exit_code: int, request_id: str = ""
    ) -> controller_pb.ReportExitResponse:
        """Report the end of a component's process."""
        request = controller_pb.ReportExitRequest(
            request_id=request_id or new_request_id(), component=component, exit_code=exit_code, log_tail="last line"
        )
        return await call(self.lifecycle.ReportExit, request, timeout_seconds=LIMIT_SECONDS)

    async def seen(self) -> activity_pb.GetActivityResponse:
        """Return the response of GetActivity."""
        request = activity_pb.GetActivityRequest()
        return await call(self.activity.GetActivity, request, timeout_seconds=LIMIT_SECONDS)


class Deploy:
    """Starts controllers of one experiment, which share its keys in Redis."""

    def __init__(self, redis: Redis, name: str, run_dir: Path, clock: Clock, stack: AsyncExitStack) -> None:
        self._redis, self._name, self._run_dir, self._clock, self._stack = redis, name, run_dir, clock, stack

    async def __call__(self, **spec: object) -> Deployed:
        """Start a controller of the experiment that `experiment` builds from `spec`."""
        settings = experiment(self._name, **spec)
        store = StateStore(self._redis, self._name)
        controller = Controller(settings, store, open_backends(settings, self._run_dir), self._clock)
        self._stack.push_async_callback(controller.close)
        await controller.start()
        address = await self._stack.enter_async_context(
            served(
                (add_ControllerServiceServicer_to_server, ControllerServicer(controller)),
                (add_ActivityServiceServicer_to_server, ActivityServicer(controller)),
            )
        )
        return Deployed(controller, await self._stack.enter_async_context(connect(address)))


class FakeWeightSync(WeightSyncServiceServicer):
    """Holds each of the given versions for validation until EndValidationHold."""

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
            await asyncio.Event().wait()  # no version is due any more, so this call never returns
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
    """Records its calls, and completes a validation at once.

    With `is_stuck`, it never completes one. It raises `refusal` if that is set. With `forgets`, it loses the first
    validation.
    """

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
