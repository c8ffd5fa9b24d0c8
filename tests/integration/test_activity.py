"""Reports of a process to the controller: work in flight, heartbeats, and errors of tracked work."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from nexrl.activity import ActivityTracker
from nexrl.errors import NexrlError
from nexrl.exception_text import MAX_MESSAGE_CHARACTERS
from nexrl.metrics_file import MetricsFile
from nexrl.rpc.client import connect
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.rpc.server import ServiceProcess
from nexrl.v1 import activity_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import add_ActivityServiceServicer_to_server
from tests.support.rollout import Fake
from tests.support.services import running_service

Context = grpc.aio.ServicerContext[Any, Any]
MODULE = pb.Module(name="rollout-0", role="rollout", address="127.0.0.1:1")


class FakeController(Fake):
    """Keeps all reports. It refuses the first `refusals` heartbeats, and asks for one every `interval_seconds`."""

    def __init__(self, refusals: int = 0, interval_seconds: float = 0.01) -> None:
        super().__init__()
        self.modules: list[pb.Module] = []
        self.errors: list[pb.ErrorReport] = []
        self.metrics: list[pb.PostMetricsRequest] = []
        self.has_ended = False
        self._refusals = refusals
        self._interval_seconds = interval_seconds

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        self.has_ended = request.ends
        self.modules.append(request.module)
        await self._notify()
        if len(self.modules) <= self._refusals:
            raise NexrlError("not now")
        return pb.HeartbeatResponse(interval_seconds=self._interval_seconds)

    async def ReportError(self, request: pb.ReportErrorRequest, context: Context) -> pb.ReportErrorResponse:
        self.errors.append(request.error)
        await self._notify()
        return pb.ReportErrorResponse(error_id=f"error-{len(self.errors)}")

    async def PostMetrics(self, request: pb.PostMetricsRequest, context: Context) -> pb.PostMetricsResponse:
        self.metrics.append(request)
        return pb.PostMetricsResponse()


@asynccontextmanager
async def served(controller: FakeController) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[EdgeInterceptor()])
    add_ActivityServiceServicer_to_server(controller, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def tracked_by(controller: FakeController) -> AsyncIterator[ActivityTracker]:
    async with served(controller) as address, connect(address) as channel:
        yield ActivityTracker(MODULE, channel)


@asynccontextmanager
async def sending_heartbeats(controller: FakeController) -> AsyncIterator[ActivityTracker]:
    """A tracker while it sends heartbeats; the controller has had the first one."""
    async with tracked_by(controller) as tracker:
        sending = asyncio.create_task(tracker.send_heartbeats())
        await controller.wait_for(lambda: bool(controller.modules))
        yield tracker
        sending.cancel()


async def begin_and_end(tracker: ActivityTracker, activity: str, times: int) -> None:
    for _ in range(times):
        with tracker.track(activity):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)


@pytest.mark.guide("C4", "M16")
async def test_tracked_work_is_in_flight_while_its_block_runs() -> None:
    tracker = ActivityTracker(MODULE, None)
    assert tracker.is_quiescent()
    with tracker.track("rollout", waiting_on="inference"), tracker.track("put"):
        snapshot = tracker.snapshot()
        assert [(work.activity, work.waiting_on) for work in snapshot.work] == [("rollout", "inference"), ("put", "")]
        assert len({work.token for work in snapshot.work}) == 2
        assert not tracker.is_quiescent()
    assert tracker.is_quiescent()
    assert tracker.module_name == "rollout-0"
    assert not MODULE.work, "the module it was given stays as it was"


@pytest.mark.guide("M17", "S1", "S3")
async def test_an_exception_that_leaves_tracked_work_is_reported_once_and_goes_on() -> None:
    async with tracked_by(controller := FakeController()) as tracker:
        with pytest.raises(ZeroDivisionError), tracker.track("step"), tracker.track("train"):
            raise ZeroDivisionError("no step")
        await tracker.reports_sent()
        assert tracker.is_quiescent()
    (error,) = controller.errors
    assert (error.module, error.work_context, error.message) == ("rollout-0", "train", "no step")
    assert (error.severity, error.exception_type) == (pb.SEVERITY_ERROR, "ZeroDivisionError")
    assert "in test_an_exception" in error.exception_traceback


async def test_cancellation_is_no_error() -> None:
    async with tracked_by(controller := FakeController()) as tracker:
        with pytest.raises(asyncio.CancelledError), tracker.track("train"):
            raise asyncio.CancelledError
        await tracker.reports_sent()
    assert controller.errors == []


@pytest.mark.guide("M11", "N3")
async def test_a_report_gives_the_errors_id_and_carries_severity_and_details() -> None:
    async with tracked_by(controller := FakeController()) as tracker:
        error_id = await tracker.report(
            "lost it", work_context="put", severity=pb.SEVERITY_WARNING, details={"group_id": "7"}
        )
    assert error_id == "error-1"
    (error,) = controller.errors
    assert (error.message, error.severity, dict(error.details)) == ("lost it", pb.SEVERITY_WARNING, {"group_id": "7"})
    assert error.exception_type == ""


async def test_an_error_with_a_text_of_any_length_is_reported() -> None:
    async with tracked_by(controller := FakeController()) as tracker:
        assert await tracker.report(ValueError("x" * 2**21), work_context="put") == "error-1"
    assert controller.errors[0].message == "x" * MAX_MESSAGE_CHARACTERS


async def test_a_controller_that_is_away_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl.activity.CALL_SECONDS", 0.1)
    async with connect("127.0.0.1:1") as channel:
        assert await ActivityTracker(MODULE, channel).report("lost it", work_context="put") == ""


@pytest.mark.guide("M15", "M21")
async def test_metrics_go_to_the_experiments_loggers_with_their_step() -> None:
    async with tracked_by(controller := FakeController()) as tracker:
        await tracker.post_metrics(3, {"reward_mean": 0.5})
    assert [(posted.step, dict(posted.metrics)) for posted in controller.metrics] == [(3, {"reward_mean": 0.5})]


@pytest.mark.guide("M8")
async def test_heartbeats_enter_the_module_and_go_on_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl.activity.RETRY_SECONDS", 0.01)
    async with tracked_by(controller := FakeController(refusals=2)) as tracker:
        with tracker.track("train"):
            beating = asyncio.create_task(tracker.send_heartbeats())
            await controller.wait_for(lambda: len(controller.modules) >= 4)
        await controller.wait_for(lambda: not controller.modules[-1].work)
        beating.cancel()
    first = controller.modules[0]
    assert (first.name, first.role, first.address) == (MODULE.name, MODULE.role, MODULE.address)
    assert [work.activity for work in first.work] == ["train"]


@pytest.mark.guide("M5", "M6", "M9")
async def test_work_that_begins_or_ends_is_reported_at_once_not_with_the_next_heartbeat() -> None:
    async with sending_heartbeats(controller := FakeController(interval_seconds=3600)) as tracker:
        for _ in range(2):
            with tracker.track("rollout"):
                await controller.wait_for(lambda: [w.activity for w in controller.modules[-1].work] == ["rollout"])
            await controller.wait_for(lambda: not controller.modules[-1].work)


async def test_a_module_that_is_busy_and_idle_in_turn_sends_few_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl.activity.MIN_HEARTBEAT_SECONDS", 3600)
    async with sending_heartbeats(controller := FakeController(interval_seconds=3600)) as tracker:
        await begin_and_end(tracker, "rollout", times=100)
    assert len(controller.modules) == 1


async def test_a_busy_module_reports_further_work_with_its_next_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl.activity.MIN_HEARTBEAT_SECONDS", 0)
    async with sending_heartbeats(controller := FakeController(interval_seconds=3600)) as tracker:
        with tracker.track("rollout"):
            await controller.wait_for(lambda: bool(controller.modules[-1].work))
            await begin_and_end(tracker, "put", times=100)
    assert len(controller.modules) == 2


@pytest.mark.guide("C1", "C2")
async def test_a_service_tells_its_name_and_role_and_that_it_stops(tmp_path: Path) -> None:
    async def start(process: ServiceProcess) -> None:
        await process.set_ready()

    controller = FakeController()
    async with served(controller) as address, running_service(tmp_path, start, controller=address):
        await controller.wait_for(lambda: bool(controller.modules))
        assert (controller.modules[0].name, controller.modules[0].role) == ("test-0", "test")
        assert not controller.has_ended
    assert controller.has_ended


async def test_without_a_controller_nothing_is_sent() -> None:
    tracker = ActivityTracker(MODULE, None)
    await tracker.send_heartbeats()
    await tracker.post_metrics(1, {"loss": 1.0})
    actions: list[Callable[[], Awaitable[object]]] = [
        tracker.reports_sent,
        lambda: tracker.report("x", work_context="y"),
    ]
    assert [await action() for action in actions] == [None, ""]


async def test_metrics_are_kept_in_a_file_where_the_controller_has_no_lasting_folder(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(MetricsFile(path)) as file:
        await ActivityTracker(MODULE, None, file).post_metrics(3, {"reward_mean": 0.5})
    (line,) = path.read_text().splitlines()
    assert json.loads(line).items() >= {"step": 3, "reward_mean": 0.5}.items()
