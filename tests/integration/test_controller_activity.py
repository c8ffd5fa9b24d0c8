"""What the controller knows of modules, work, errors and metrics, over gRPC and a real Redis."""

import asyncio
import json
from pathlib import Path

import pytest

from nexrl.activity import ActivityTracker
from nexrl.errors import InvalidArgumentError
from nexrl.rpc.client import call
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as controller_pb
from nexrl_controller.events import VersionCommitted
from tests.support.clock import Clock
from tests.support.controller import Deploy
from tests.support.patience import LIMIT_SECONDS, eventually


def waits(on: str, start: float) -> activity_pb.Work:
    return activity_pb.Work(token=on, activity="wait", start_unix_seconds=start, waiting_on=on)


@pytest.mark.guide("A5", "M3", "M4", "M5", "M6", "M7", "S12")
async def test_work_is_tracked_over_grpc(controllers: Deploy) -> None:
    deployed = await controllers()
    start = activity_pb.StartWorkRequest(request_id="token-1", module="script", activity="evaluate")
    token = (await call(deployed.activity.StartWork, start, timeout_seconds=LIMIT_SECONDS)).token
    assert (await call(deployed.activity.StartWork, start, timeout_seconds=LIMIT_SECONDS)).token == token
    quiescent = activity_pb.WaitQuiescentRequest()
    assert not (await call(deployed.activity.WaitQuiescent, quiescent, timeout_seconds=LIMIT_SECONDS)).quiescent
    only_rollout = activity_pb.WaitQuiescentRequest(rollout_only=True)
    assert (await call(deployed.activity.WaitQuiescent, only_rollout, timeout_seconds=LIMIT_SECONDS)).quiescent
    assert "script: 1 x evaluate" in (await deployed.seen()).summary

    for request_id in ("end-1", "end-2"):
        end = activity_pb.EndWorkRequest(request_id=request_id, token=token)
        await call(deployed.activity.EndWork, end, timeout_seconds=LIMIT_SECONDS)
    quiescent.wait_seconds = 5
    assert (await call(deployed.activity.WaitQuiescent, quiescent, timeout_seconds=LIMIT_SECONDS)).quiescent


@pytest.mark.guide("A5", "D5", "M10", "Q47", "S7", "S12")
async def test_a_silent_module_is_shown_as_dead_and_reported_once(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers()
    assert await deployed.heartbeat("trainer") == 5
    clock.advance(31)
    await deployed.controller.check_health()
    await deployed.controller.check_health()
    seen = await deployed.seen()
    assert [(module.name, module.alive, module.silent_seconds) for module in seen.modules] == [("trainer", False, 31)]
    assert [error.message for error in seen.errors] == ["trainer has been silent for more than 30 s"]
    assert (seen.health, seen.error_level_count) == ("error", 1)


async def test_a_module_that_says_that_it_ends_is_not_missed(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers()
    await deployed.heartbeat("rollout-1")
    await ActivityTracker(activity_pb.Module(name="rollout-1"), deployed.channel).send_last_heartbeat()
    clock.advance(31)
    await deployed.controller.check_health()
    seen = await deployed.seen()
    assert [module.alive for module in seen.modules] == [False]
    assert not seen.errors


@pytest.mark.guide("Q47")
async def test_nothing_is_reported_of_silence_when_health_checks_are_off(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers(monitor={"health": {"enabled": False}})
    await deployed.heartbeat("trainer")
    clock.advance(31)
    await deployed.controller.check_health()
    seen = await deployed.seen()
    assert not seen.modules[0].alive
    assert not seen.errors


@pytest.mark.guide("S5", "S8")
async def test_a_stall_names_the_blocking_edge_once(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers(monitor={"health": {"timeoutSeconds": 600}})
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


async def test_models_that_are_being_loaded_are_no_stall(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers(monitor={"health": {"timeoutSeconds": 600}})
    await deployed.heartbeat("trainer", work=[waits("trajectory-pool", clock())])
    clock.advance(300)
    await deployed.controller.check_health()
    assert (await deployed.experiment()).reason == "ComponentsStarting"
    assert not (await deployed.seen()).errors
    await deployed.controller.apply(VersionCommitted(0))
    clock.advance(59)
    await deployed.controller.check_health()
    assert (await deployed.experiment()).reason == "Training"


async def test_an_experiment_without_a_new_step_fails_and_names_what_blocks(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers(monitor={"health": {"timeoutSeconds": 900, "stallDeadlineSeconds": 600}})
    await deployed.controller.apply(VersionCommitted(0))
    await deployed.post(1)
    clock.advance(500)
    await deployed.post(1)  # a trainer that repeats a step makes no progress
    await deployed.heartbeat("trainer", work=[waits("trajectory-pool", clock() - 500)])
    await deployed.controller.check_health()
    assert (await deployed.experiment()).phase == controller_pb.PHASE_RUNNING
    clock.advance(100)
    await deployed.controller.check_health()
    failed = await deployed.experiment()
    assert (failed.phase, failed.reason) == (controller_pb.PHASE_STOPPING, "StallDeadlineExceeded")
    assert "stallDeadlineSeconds; blocked at trainer -> trajectory-pool" in failed.message


async def test_a_new_step_moves_the_stall_deadline(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers(monitor={"health": {"timeoutSeconds": 900, "stallDeadlineSeconds": 600}})
    await deployed.controller.apply(VersionCommitted(0))
    for step in (1, 2, 3):
        clock.advance(400)
        await deployed.post(step)
        await deployed.controller.check_health()
    assert (await deployed.experiment()).phase == controller_pb.PHASE_RUNNING


async def test_slow_steps_are_no_stall(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers(monitor={"health": {"timeoutSeconds": 600}})
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
async def test_an_error_is_kept_with_all_it_says(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers()
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
        answer = await call(deployed.activity.ReportError, request, timeout_seconds=LIMIT_SECONDS)
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
async def test_an_error_without_severity_counts_as_error(controllers: Deploy) -> None:
    deployed = await controllers(monitor={"errors": {"policy": "stop_on_error"}})
    await deployed.heartbeat("trainer")
    request = activity_pb.ReportErrorRequest(
        request_id="1", error=activity_pb.ErrorReport(module="trainer", message="x")
    )
    await call(deployed.activity.ReportError, request, timeout_seconds=LIMIT_SECONDS)
    stopping = await deployed.experiment()
    assert (stopping.phase, stopping.reason, stopping.message) == (
        controller_pb.PHASE_STOPPING,
        "ErrorReported",
        "trainer: x",
    )


@pytest.mark.guide("M2", "M15", "Q43")
async def test_a_repeated_post_is_one_line(controllers: Deploy, tmp_path: Path, clock: Clock) -> None:
    deployed = await controllers()
    await deployed.post(1, request_id="post-1", loss=0.5)
    await deployed.post(1, request_id="post-1", loss=0.5)
    await deployed.post(1, request_id="post-2", val__reward=0.25)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"loss": 0.5, "step": 1, "time": clock()}, {"val/reward": 0.25, "step": 1, "time": clock()}]


@pytest.mark.guide("M16", "M17", "M19", "M20", "M21", "N2", "S1", "S3")
async def test_a_modules_tracker_forwards_to_the_controller(controllers: Deploy) -> None:
    deployed = await controllers()
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
async def test_a_bad_request_names_its_field(
    controllers: Deploy, method: str, request_message: object, field: str
) -> None:
    deployed = await controllers()
    with pytest.raises(InvalidArgumentError) as caught:
        await call(getattr(deployed.activity, method), request_message, timeout_seconds=LIMIT_SECONDS)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.guide("Q48", "Q49")
async def test_silence_is_judged_as_the_experiment_says(controllers: Deploy, clock: Clock) -> None:
    deployed = await controllers(monitor={"health": {"checkIntervalSeconds": 2, "timeoutSeconds": 7}})
    assert await deployed.heartbeat("trainer") == 2
    clock.advance(7)
    await deployed.controller.check_health()
    assert not (await deployed.seen()).errors
    clock.advance(1)
    await deployed.controller.check_health()
    assert [error.message for error in (await deployed.seen()).errors] == ["trainer has been silent for more than 7 s"]


@pytest.mark.guide("M8", "O5", "S13")
async def test_the_members_of_each_role_are_told_with_their_addresses(controllers: Deploy) -> None:
    deployed = await controllers()
    for name, role in (("rollout-0", "rollout"), ("trainer", "trainer"), ("rollout-1", "rollout")):
        await deployed.heartbeat(name, role)
    assert [(module.role, module.name, module.address) for module in (await deployed.seen()).modules] == [
        ("rollout", "rollout-0", "127.0.0.1:1"),
        ("trainer", "trainer", "127.0.0.1:1"),
        ("rollout", "rollout-1", "127.0.0.1:1"),
    ]


@pytest.mark.guide("N5")
async def test_each_severity_is_kept_and_counted(controllers: Deploy) -> None:
    deployed = await controllers()
    severities = [activity_pb.SEVERITY_INFO, activity_pb.SEVERITY_WARNING, activity_pb.SEVERITY_ERROR]
    for number, severity in enumerate(severities):
        error = activity_pb.ErrorReport(module="trainer", severity=severity, message="x")
        request = activity_pb.ReportErrorRequest(request_id=str(number), error=error)
        await call(deployed.activity.ReportError, request, timeout_seconds=LIMIT_SECONDS)
    seen = await deployed.seen()
    assert [error.severity for error in seen.errors] == severities[::-1]
    assert (seen.recent_error_count, seen.warning_level_count, seen.error_level_count) == (3, 1, 1)


@pytest.mark.guide("M9", "M18", "R5")
async def test_tracked_work_of_a_rollout_worker_is_waited_for_and_its_metrics_are_kept(
    controllers: Deploy, tmp_path: Path
) -> None:
    deployed = await controllers(monitor={"health": {"checkIntervalSeconds": 0.1}})
    tracker = ActivityTracker(activity_pb.Module(name="rollout-0", role="rollout"), deployed.channel)
    heartbeats = asyncio.create_task(tracker.send_heartbeats())

    async def is_quiescent(wait_seconds: float = 0) -> bool:
        request = activity_pb.WaitQuiescentRequest(rollout_only=True, wait_seconds=wait_seconds)
        return (await call(deployed.activity.WaitQuiescent, request, timeout_seconds=2 * LIMIT_SECONDS)).quiescent

    async def is_working() -> bool:
        return any(module.work for module in (await deployed.seen()).modules)

    with tracker.track("rollout"):
        await eventually(is_working)
        assert not await is_quiescent()
        await tracker.post_metrics(3, {"reward_mean": 0.5})
    assert await is_quiescent(wait_seconds=LIMIT_SECONDS)
    heartbeats.cancel()
    assert '"reward_mean": 0.5, "step": 3' in (tmp_path / "metrics.jsonl").read_text()
