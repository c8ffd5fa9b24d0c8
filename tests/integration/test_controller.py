"""The controller over gRPC and a real Redis: its two services, its restart, its validations."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nexrl.activity import ActivityTracker
from nexrl.errors import InvalidArgumentError, UnavailableError
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.rpc.server import ServiceProcess
from nexrl.settings import Settings
from nexrl.store import Redis
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as controller_pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub, add_ActivityServiceServicer_to_server
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub, add_ControllerServiceServicer_to_server
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub, add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub, add_WeightSyncServiceServicer_to_server
from nexrl_controller import server
from nexrl_controller.controller import Controller
from nexrl_controller.error_log import Severity
from nexrl_controller.events import Started, VersionCommitted
from nexrl_controller.logging_backends import open_backends
from nexrl_controller.policy_versions import follow_policy_versions
from nexrl_controller.service import ActivityServicer, ControllerServicer
from nexrl_controller.state import Phase
from nexrl_controller.state_store import StateStore
from nexrl_controller.validation import Validation
from tests.support.controller import Clock, FakeValidator, FakeWeightSync, experiment, served

if TYPE_CHECKING:
    from nexrl.v1.activity_service_pb2_grpc import ActivityServiceAsyncStub
    from nexrl.v1.controller_service_pb2_grpc import ControllerServiceAsyncStub

CALL_SECONDS = 10.0


class Deployed:
    """A controller that serves, and its stubs."""

    def __init__(self, controller: Controller, channel: grpc.aio.Channel) -> None:
        self.controller = controller
        self.channel = channel
        self.lifecycle: ControllerServiceAsyncStub = ControllerServiceStub(channel)
        self.activity: ActivityServiceAsyncStub = ActivityServiceStub(channel)

    async def experiment(self) -> controller_pb.Experiment:
        request = controller_pb.GetExperimentRequest()
        return (await call(self.lifecycle.GetExperiment, request, timeout_seconds=CALL_SECONDS)).experiment

    async def post(self, step: int, request_id: str = "", **metrics: float) -> None:
        request = activity_pb.PostMetricsRequest(
            request_id=request_id or new_request_id(),
            step=step,
            metrics={k.replace("__", "/"): v for k, v in metrics.items()},
        )
        await call(self.activity.PostMetrics, request, timeout_seconds=CALL_SECONDS)

    async def heartbeat(self, name: str, role: str = "", work: Sequence[activity_pb.Work] = ()) -> float:
        module = activity_pb.Module(name=name, role=role or name, work=work, address="127.0.0.1:1")
        request = activity_pb.HeartbeatRequest(module=module)
        return (await call(self.activity.Heartbeat, request, timeout_seconds=CALL_SECONDS)).interval_seconds

    async def report_exit(
        self, component: str, exit_code: int, request_id: str = ""
    ) -> controller_pb.ReportExitResponse:
        request = controller_pb.ReportExitRequest(
            request_id=request_id or new_request_id(), component=component, exit_code=exit_code, log_tail="last line"
        )
        return await call(self.lifecycle.ReportExit, request, timeout_seconds=CALL_SECONDS)

    async def seen(self) -> activity_pb.GetActivityResponse:
        request = activity_pb.GetActivityRequest()
        return await call(self.activity.GetActivity, request, timeout_seconds=CALL_SECONDS)


class Deploy:
    """Starts controllers of one experiment, on the same Redis keys."""

    def __init__(self, redis: Redis, name: str, run_dir: Path, clock: Clock, stack: AsyncExitStack) -> None:
        self._redis, self._name, self._run_dir, self._clock, self._stack = redis, name, run_dir, clock, stack

    async def __call__(self, **spec: object) -> Deployed:
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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def deploy(redis: Redis, experiment_name: str, tmp_path: Path, clock: Clock) -> AsyncIterator[Deploy]:
    async with AsyncExitStack() as stack:
        yield Deploy(redis, experiment_name, tmp_path, clock, stack)


def waits(on: str, start: float) -> activity_pb.Work:
    return activity_pb.Work(token=on, activity="wait", start_unix_seconds=start, waiting_on=on)


# lifecycle -----------------------------------------------------------------------------------------------------------


@pytest.mark.guide("D1", "D2", "D4", "M13", "M14")
async def test_an_experiment_succeeds_when_its_components_have_stopped(deploy: Deploy) -> None:
    deployed = await deploy(validation=None)
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STARTING
    for name in ("trainer", "rollout-0"):
        await deployed.heartbeat(name)
    await deployed.controller.apply(VersionCommitted(0))
    await deployed.post(4, reward_mean=0.75)
    running = await deployed.experiment()
    assert (running.phase, running.progress.step, running.progress.total_steps) == (controller_pb.PHASE_RUNNING, 4, 4)
    assert dict(running.progress.metrics) == {"reward_mean": 0.75}
    assert (await deployed.seen()).training_step == 4

    await deployed.post(4, training_complete=1)
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STOPPING
    assert not (await deployed.report_exit("rollout-0", -15)).restart
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STOPPING
    assert not (await deployed.report_exit("trainer", 0)).restart
    ended = await deployed.experiment()
    assert (ended.phase, ended.reason) == (controller_pb.PHASE_SUCCEEDED, "Completed")


@pytest.mark.guide("D3")
async def test_a_stop_ends_in_failure_that_says_so_and_can_be_repeated(deploy: Deploy) -> None:
    deployed = await deploy()
    await deployed.heartbeat("trainer")
    request = controller_pb.StopExperimentRequest(request_id="1", reason="Ctrl-C")
    for _ in range(2):
        await call(deployed.lifecycle.StopExperiment, request, timeout_seconds=CALL_SECONDS)
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STOPPING
    await deployed.report_exit("trainer", 0)
    ended = await deployed.experiment()
    assert (ended.phase, ended.reason, ended.message) == (controller_pb.PHASE_FAILED, "Stopped", "Ctrl-C")


@pytest.mark.guide("D3")
async def test_components_that_do_not_stop_do_not_keep_the_experiment_open(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl_controller.controller.STOP_SECONDS", 0.01)
    deployed = await deploy()
    await deployed.heartbeat("trainer")
    await deployed.controller.stop("enough")
    await deployed.controller.bound_stop()
    assert deployed.controller.state.phase is Phase.FAILED


@pytest.mark.guide("A6")
async def test_a_component_is_started_again_until_its_limit(deploy: Deploy) -> None:
    deployed = await deploy(failurePolicy={"maxRestarts": 1})
    await deployed.heartbeat("rollout-0")
    await deployed.controller.apply(VersionCommitted(0))
    first = await deployed.report_exit("rollout-0", -9)
    assert (first.restart, first.delay_seconds) == (True, 0.5)
    restarting = await deployed.experiment()
    assert (restarting.phase, restarting.restarts) == (controller_pb.PHASE_RESTARTING, 1)
    await deployed.heartbeat("rollout-0")
    assert (await deployed.experiment()).phase == controller_pb.PHASE_RUNNING

    assert not (await deployed.report_exit("rollout-0", 1)).restart
    failed = await deployed.experiment()
    assert (failed.phase, failed.reason) == (controller_pb.PHASE_FAILED, "ComponentFailed")
    assert "rollout-0 ended with exit code 1" in failed.message
    assert failed.message.endswith("last line")
    seen = await deployed.seen()
    assert [error.severity for error in seen.errors] == [activity_pb.SEVERITY_CRITICAL, activity_pb.SEVERITY_WARNING]


async def test_a_watch_gives_the_whole_state_at_once_and_at_each_change(deploy: Deploy) -> None:
    deployed = await deploy()
    watch = deployed.lifecycle.WatchExperiment(controller_pb.WatchExperimentRequest(), timeout=CALL_SECONDS)
    states = aiter(watch)
    assert (await anext(states)).experiment.phase == controller_pb.PHASE_STARTING
    await deployed.controller.apply(VersionCommitted(0))
    for step in range(1, 4):
        await deployed.post(step, loss=step)
    newest = (await anext(states)).experiment
    while (
        newest.progress.step < 3
    ):  # changes that come close together are told together; how close, the machine decides
        newest = (await anext(states)).experiment
    assert newest.phase == controller_pb.PHASE_RUNNING
    deployed.controller.end_watches()
    assert [state async for state in states] == []


async def test_a_restarted_controller_goes_on_where_the_killed_one_was(deploy: Deploy, clock: Clock) -> None:
    killed = await deploy()
    await killed.controller.apply(VersionCommitted(0))
    await killed.post(2, loss=0.5, entropy=math.nan)
    first = await killed.report_exit("rollout-0", 1, request_id="exit-1")
    before = killed.controller.state

    clock.advance(100)
    restarted = await deploy()
    after = restarted.controller.state
    assert math.isnan(after.metrics["entropy"])
    assert repr(after) == repr(before)
    assert await restarted.report_exit("rollout-0", 1, request_id="exit-1") == first
    assert restarted.controller.state.restarts == 1


async def test_a_suspended_experiment_waits_and_goes_on_when_resumed(deploy: Deploy) -> None:
    suspended = await deploy(suspend=True)
    assert (await suspended.experiment()).phase == controller_pb.PHASE_SUSPENDED
    assert (await (await deploy()).experiment()).phase == controller_pb.PHASE_STARTING


async def test_a_redis_that_is_down_leaves_the_old_state(experiment_name: str) -> None:
    closed = StateStore(Redis.from_url("redis://127.0.0.1:1", retry=None), experiment_name)
    with pytest.raises(UnavailableError, match="Redis"):
        await closed.load()
    controller = Controller(experiment(experiment_name), closed, [], Clock())
    with pytest.raises(UnavailableError, match="Redis"):
        await controller.apply(Started(is_suspended=False))
    assert controller.state.phase is Phase.PENDING


# activity ------------------------------------------------------------------------------------------------------------


@pytest.mark.guide("A5", "M3", "M4", "M5", "M6", "M7", "M9", "R5", "S12")
async def test_work_is_tracked_over_grpc(deploy: Deploy) -> None:
    deployed = await deploy()
    start = activity_pb.StartWorkRequest(request_id="token-1", module="script", activity="evaluate")
    token = (await call(deployed.activity.StartWork, start, timeout_seconds=CALL_SECONDS)).token
    assert (await call(deployed.activity.StartWork, start, timeout_seconds=CALL_SECONDS)).token == token
    quiescent = activity_pb.WaitQuiescentRequest()
    assert not (await call(deployed.activity.WaitQuiescent, quiescent, timeout_seconds=CALL_SECONDS)).quiescent
    only_rollout = activity_pb.WaitQuiescentRequest(rollout_only=True)
    assert (await call(deployed.activity.WaitQuiescent, only_rollout, timeout_seconds=CALL_SECONDS)).quiescent
    assert "script: 1 x evaluate" in (await deployed.seen()).summary

    for request_id in ("end-1", "end-2"):
        end = activity_pb.EndWorkRequest(request_id=request_id, token=token)
        await call(deployed.activity.EndWork, end, timeout_seconds=CALL_SECONDS)
    quiescent.wait_seconds = 5
    assert (await call(deployed.activity.WaitQuiescent, quiescent, timeout_seconds=CALL_SECONDS)).quiescent


@pytest.mark.guide("A5", "D5", "M8", "M10", "Q47", "Q48", "Q49", "S7", "S13")
async def test_a_silent_module_is_shown_as_dead_and_reported_once(deploy: Deploy, clock: Clock) -> None:
    deployed = await deploy()
    assert await deployed.heartbeat("trainer") == 5
    clock.advance(31)
    await deployed.controller.check_health()
    await deployed.controller.check_health()
    seen = await deployed.seen()
    assert [(module.name, module.alive, module.silent_seconds) for module in seen.modules] == [("trainer", False, 31)]
    assert [error.message for error in seen.errors] == ["trainer has been silent for more than 30 s"]
    assert (seen.health, seen.error_level_count) == ("error", 1)


async def test_a_module_that_says_that_it_ends_is_not_missed(deploy: Deploy, clock: Clock) -> None:
    deployed = await deploy()
    await deployed.heartbeat("rollout-1")
    await ActivityTracker(activity_pb.Module(name="rollout-1"), deployed.channel).send_last_heartbeat()
    clock.advance(31)
    await deployed.controller.check_health()
    seen = await deployed.seen()
    assert [module.alive for module in seen.modules] == [False]
    assert not seen.errors


@pytest.mark.guide("Q47")
async def test_nothing_is_reported_of_silence_when_health_checks_are_off(deploy: Deploy, clock: Clock) -> None:
    deployed = await deploy(monitor={"health": {"enabled": False}})
    await deployed.heartbeat("trainer")
    clock.advance(31)
    await deployed.controller.check_health()
    seen = await deployed.seen()
    assert not seen.modules[0].alive
    assert not seen.errors


@pytest.mark.guide("S5", "S8")
async def test_a_stall_names_the_blocking_edge_once(deploy: Deploy, clock: Clock) -> None:
    deployed = await deploy(monitor={"health": {"timeoutSeconds": 600}})
    await deployed.controller.apply(VersionCommitted(0))
    await deployed.heartbeat("trainer", work=[waits("trajectory-pool", clock())])
    await deployed.heartbeat("rollout-0", "rollout", [waits("inference", clock())])
    clock.advance(59)
    await deployed.controller.check_health()
    assert (await deployed.experiment()).reason == "Training"
    clock.advance(2)
    await deployed.controller.check_health()
    await deployed.controller.check_health()
    stalled = await deployed.experiment()
    assert stalled.reason == "Stalled"
    assert stalled.message.startswith("no step for 61 s; blocked at trainer -> trajectory-pool")
    assert [error.severity for error in (await deployed.seen()).errors] == [activity_pb.SEVERITY_WARNING]
    await deployed.post(1, loss=0.5)
    assert (await deployed.experiment()).reason == "Training"


async def test_models_that_are_being_loaded_are_no_stall(deploy: Deploy, clock: Clock) -> None:
    deployed = await deploy(monitor={"health": {"timeoutSeconds": 600}})
    await deployed.heartbeat("trainer", work=[waits("trajectory-pool", clock())])
    clock.advance(300)
    await deployed.controller.check_health()
    assert (await deployed.experiment()).reason == "ComponentsStarting"
    assert not (await deployed.seen()).errors
    await deployed.controller.apply(VersionCommitted(0))
    clock.advance(59)
    await deployed.controller.check_health()
    assert (await deployed.experiment()).reason == "Training"


async def test_slow_steps_are_no_stall(deploy: Deploy, clock: Clock) -> None:
    deployed = await deploy(monitor={"health": {"timeoutSeconds": 600}})
    await deployed.controller.apply(VersionCommitted(0))
    await deployed.post(1)
    clock.advance(50)
    await deployed.post(2)
    await deployed.heartbeat("trainer", work=[waits("trajectory-pool", clock())])
    clock.advance(149)
    await deployed.controller.check_health()
    assert (await deployed.experiment()).reason == "Training"
    clock.advance(2)
    await deployed.controller.check_health()
    assert (await deployed.experiment()).reason == "Stalled"


@pytest.mark.guide("M11", "M12", "N2", "N3", "N4", "N6", "S14")
async def test_an_error_is_kept_with_all_it_says(deploy: Deploy, clock: Clock) -> None:
    deployed = await deploy()
    sent = activity_pb.ErrorReport(
        module="trainer",
        work_context="step 3",
        severity=activity_pb.SEVERITY_ERROR,
        message="loss is NaN",
        details={"loss": "nan"},
        exception_type="ValueError",
        exception_traceback="Traceback ...",
    )
    request = activity_pb.ReportErrorRequest(request_id="error-1", error=sent)
    for _ in range(2):
        answer = await call(deployed.activity.ReportError, request, timeout_seconds=CALL_SECONDS)
    seen = await deployed.seen()
    sent.error_id, sent.unix_seconds = answer.error_id, clock()
    assert list(seen.errors) == [sent]
    assert (seen.health, seen.recent_error_count, seen.error_level_count, seen.warning_level_count) == (
        "error",
        1,
        1,
        0,
    )
    assert seen.summary.startswith("error: 1 errors and 0 warnings in the last 5 minutes")


@pytest.mark.guide("D6", "M11", "Q45", "Q46")
async def test_an_error_without_severity_counts_as_error(deploy: Deploy) -> None:
    deployed = await deploy(monitor={"errors": {"policy": "stop_on_error"}})
    await deployed.heartbeat("trainer")
    request = activity_pb.ReportErrorRequest(
        request_id="1", error=activity_pb.ErrorReport(module="trainer", message="x")
    )
    await call(deployed.activity.ReportError, request, timeout_seconds=CALL_SECONDS)
    stopping = await deployed.experiment()
    assert (stopping.phase, stopping.reason, stopping.message) == (
        controller_pb.PHASE_STOPPING,
        "ErrorReported",
        "trainer: x",
    )


@pytest.mark.guide("M2", "M15", "Q43")
async def test_a_repeated_post_is_one_line(deploy: Deploy, tmp_path: Path, clock: Clock) -> None:
    deployed = await deploy()
    await deployed.post(1, request_id="post-1", loss=0.5)
    await deployed.post(1, request_id="post-1", loss=0.5)
    await deployed.post(1, request_id="post-2", val__reward=0.25)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"loss": 0.5, "step": 1, "time": clock()}, {"val/reward": 0.25, "step": 1, "time": clock()}]


@pytest.mark.guide("M16", "M17", "M19", "M20", "M21", "N2", "S1", "S3")
async def test_a_modules_tracker_forwards_to_the_controller(deploy: Deploy) -> None:
    deployed = await deploy()
    tracker = ActivityTracker(activity_pb.Module(name="rollout-0", role="rollout"), deployed.channel)
    with tracker.track("rollout"):
        await deployed.heartbeat("rollout-0", "rollout", tracker.snapshot().work)
        assert not deployed.controller.activity.is_quiescent(rollout_only=True)
    try:
        raise ValueError("reward is not a number")
    except ValueError as error:
        error_id = await tracker.report(error, work_context="score")
    await tracker.post_metrics(3, {"reward_mean": 0.5})
    seen = await deployed.seen()
    assert (seen.errors[0].error_id, seen.errors[0].exception_type) == (error_id, "ValueError")
    assert "reward is not a number" in seen.errors[0].exception_traceback
    assert seen.training_step == 3


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("PostMetrics", activity_pb.PostMetricsRequest(), "request_id"),
        ("PostMetrics", activity_pb.PostMetricsRequest(request_id="1", step=-1), "step"),
        (
            "PostMetrics",
            activity_pb.PostMetricsRequest(request_id="1", metrics={str(i): 0.0 for i in range(1001)}),
            "metrics",
        ),
        ("Heartbeat", activity_pb.HeartbeatRequest(), "module.name"),
        ("StartWork", activity_pb.StartWorkRequest(request_id="1", module="m" * 257), "module"),
        ("ReportError", activity_pb.ReportErrorRequest(request_id="1"), "error.module"),
    ],
    ids=["no id", "negative step", "too many metrics", "no name", "long name", "no module"],
)
async def test_a_bad_request_names_its_field(deploy: Deploy, method: str, request_message: object, field: str) -> None:
    deployed = await deploy()
    with pytest.raises(InvalidArgumentError) as caught:
        await call(getattr(deployed.activity, method), request_message, timeout_seconds=CALL_SECONDS)
    assert [violation.field for violation in caught.value.violations] == [field]


# validation and versions ---------------------------------------------------------------------------------------------


class Validated:
    """What became of validating version 4, the last one, of a trained experiment."""

    def __init__(self, deployed: Deployed, weight_sync: FakeWeightSync, validator: FakeValidator) -> None:
        self.state = deployed.controller.state
        self.errors = deployed.controller.errors.newest(10)
        self.is_released = weight_sync.is_released.is_set()
        self.calls = validator.calls


async def validated(deploy: Deploy, validator: FakeValidator, timeout_seconds: float = 30) -> Validated:
    deployed = await deploy()
    await deployed.heartbeat("trainer")
    await deployed.post(4, training_complete=1)
    weight_sync = FakeWeightSync([4])
    async with (
        served(
            (add_WeightSyncServiceServicer_to_server, weight_sync), (add_ValidatorServiceServicer_to_server, validator)
        ) as address,
        connect(address) as channel,
    ):
        stubs: tuple[Any, Any] = (WeightSyncServiceStub(channel), ValidatorServiceStub(channel))
        await Validation(deployed.controller, *stubs, "default", timeout_seconds).run()
    return Validated(deployed, weight_sync, validator)


@pytest.mark.guide("D10", "D11", "D12", "K5", "L11", "L12", "R6")
async def test_a_held_version_is_measured_posted_and_released(deploy: Deploy, tmp_path: Path) -> None:
    outcome = await validated(deploy, FakeValidator())
    assert outcome.calls == ["start 4", "end 4"]
    assert outcome.is_released
    assert (outcome.state.validated_version, outcome.state.outcome) == (4, Phase.SUCCEEDED)
    assert outcome.state.metrics["val/reward"] == 0.5
    assert '"val/reward": 0.5' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.guide("D12", "S10")
async def test_a_validation_that_never_ends_is_reported_and_released(deploy: Deploy) -> None:
    outcome = await validated(deploy, FakeValidator(is_stuck=True), timeout_seconds=0.1)
    assert outcome.calls == ["start 4", "end 4"]
    assert outcome.is_released
    assert [error.severity for error in outcome.errors] == [Severity.ERROR]
    assert "validation of version 4 failed: it did not end within 0.1 s" in outcome.errors[0].message


async def test_a_validation_that_redis_has_lost_is_started_again(deploy: Deploy) -> None:
    outcome = await validated(deploy, FakeValidator(forgets=True))
    assert outcome.calls == ["start 4", "start 4", "end 4"]
    assert outcome.errors == []
    assert outcome.state.metrics["val/reward"] == 0.5


@pytest.mark.guide("S10")
async def test_a_validation_that_cannot_start_is_reported_and_released(deploy: Deploy) -> None:
    outcome = await validated(deploy, FakeValidator(refusal=InvalidArgumentError("no validation data")))
    assert outcome.is_released
    assert "no validation data" in outcome.errors[0].message


async def test_commits_are_followed(deploy: Deploy) -> None:
    deployed = await deploy()
    weight_sync = (add_WeightSyncServiceServicer_to_server, FakeWeightSync([]))
    async with served(weight_sync) as address, connect(address) as channel:
        following = asyncio.create_task(
            follow_policy_versions(deployed.controller, WeightSyncServiceStub(channel), "default")
        )
        await deployed.controller.wait_for_phase(Phase.RUNNING)
        async for state in deployed.controller.watch():
            if state.policy_version == 1:
                break
        following.cancel()
        assert deployed.controller.state.policy_version == 1


# the process ---------------------------------------------------------------------------------------------------------


@pytest.mark.guide("C1", "C5")
async def test_the_process_validates_and_stops_while_it_is_watched(
    redis_url: str, experiment_name: str, tmp_path: Path
) -> None:
    weight_sync, validator = FakeWeightSync([0]), FakeValidator()
    async with served(
        (add_WeightSyncServiceServicer_to_server, weight_sync), (add_ValidatorServiceServicer_to_server, validator)
    ) as peers:
        settings = Settings(
            experiment_file=tmp_path / "experiment.yaml",
            run_dir=tmp_path,
            instance="controller",
            redis_url=redis_url,
            weight_sync=peers,
            trajectory_pool=peers,
            drain_seconds=CALL_SECONDS,
        )
        process = ServiceProcess("controller", settings, experiment(experiment_name))
        async with asyncio.TaskGroup() as tasks, connect(process.address) as channel:
            tasks.create_task(process.run(server.start))
            watch = ControllerServiceStub(channel).WatchExperiment(
                controller_pb.WatchExperimentRequest(), timeout=CALL_SECONDS, wait_for_ready=True
            )
            await weight_sync.is_released.wait()
            health: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="nexrl.v1.ControllerService")
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            process.stopping.set()
            assert [seen.experiment.name async for seen in watch][-1] == experiment_name
    assert validator.calls == ["start 0", "end 0"]


async def test_a_controller_that_cannot_find_the_others_says_so(
    redis_url: str, experiment_name: str, tmp_path: Path
) -> None:
    settings = Settings(
        experiment_file=tmp_path / "experiment.yaml", run_dir=tmp_path, instance="controller", redis_url=redis_url
    )
    process = ServiceProcess("controller", settings, experiment(experiment_name))
    with pytest.raises(InvalidArgumentError, match="NEXRL_WEIGHT_SYNC"):
        await process.run(server.start)
