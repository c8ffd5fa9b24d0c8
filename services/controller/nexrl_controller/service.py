"""The controller's servicers. They translate between protobuf messages and plain objects."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc

from nexrl.errors import InvalidArgumentError, Violation
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as controller_pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceServicer
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceServicer
from nexrl_controller.activity import Module, Work
from nexrl_controller.controller import Controller
from nexrl_controller.error_log import ErrorReport, Severity
from nexrl_controller.events import ComponentExited
from nexrl_controller.state import State

MAX_ERRORS_SHOWN = 100
MAX_METRICS = 1000
MAX_NAME_CHARACTERS = 256

Context = grpc.aio.ServicerContext[Any, Any]


class ControllerServicer(ControllerServiceServicer):
    """Serves nexrl.v1.ControllerService."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def GetExperiment(
        self, request: controller_pb.GetExperimentRequest, context: Context
    ) -> controller_pb.GetExperimentResponse:
        return controller_pb.GetExperimentResponse(experiment=self._message(self._controller.state))

    async def WatchExperiment(
        self, request: controller_pb.WatchExperimentRequest, context: Context
    ) -> AsyncIterator[controller_pb.WatchExperimentResponse]:
        async for state in self._controller.watch():
            yield controller_pb.WatchExperimentResponse(experiment=self._message(state))

    async def StopExperiment(
        self, request: controller_pb.StopExperimentRequest, context: Context
    ) -> controller_pb.StopExperimentResponse:
        await self._controller.stop(request.reason)
        return controller_pb.StopExperimentResponse()

    async def ReportExit(
        self, request: controller_pb.ReportExitRequest, context: Context
    ) -> controller_pb.ReportExitResponse:
        _require_names(component=request.component)
        verdict = await self._controller.report_exit(
            ComponentExited(request.request_id, request.component, request.exit_code, request.log_tail)
        )
        return controller_pb.ReportExitResponse(restart=verdict.restart, delay_seconds=verdict.delay_seconds)

    def _message(self, state: State) -> controller_pb.Experiment:
        return controller_pb.Experiment(
            name=self._controller.name,
            phase=controller_pb.Phase.Value(f"PHASE_{state.phase.name}"),
            reason=state.reason,
            message=state.message,
            progress=controller_pb.Progress(
                step=state.step,
                total_steps=self._controller.rules.total_steps,
                policy_version=state.policy_version,
                metrics=state.metrics,
            ),
            start_unix_seconds=state.start_unix_seconds,
            restarts=state.restarts,
            failing_samples=state.failing_samples,
        )


class ActivityServicer(ActivityServiceServicer):
    """Serves nexrl.v1.ActivityService."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._activity = controller.activity

    async def Heartbeat(self, request: activity_pb.HeartbeatRequest, context: Context) -> activity_pb.HeartbeatResponse:
        sent = request.module
        _require_names(**{"module.name": sent.name})
        if request.ends:
            self._activity.mark_dead(sent.name)
            return activity_pb.HeartbeatResponse()
        module = Module(sent.name, sent.role, sent.address, sent.metrics_url)
        work = [Work(w.token, w.activity, w.start_unix_seconds, w.waiting_on) for w in sent.work]
        return activity_pb.HeartbeatResponse(interval_seconds=await self._controller.heartbeat(module, work))

    async def StartWork(self, request: activity_pb.StartWorkRequest, context: Context) -> activity_pb.StartWorkResponse:
        _require_names(module=request.module)
        # The request id is the token, which makes the call idempotent.
        self._activity.start_work(request.module, request.request_id, request.activity)
        return activity_pb.StartWorkResponse(token=request.request_id)

    async def EndWork(self, request: activity_pb.EndWorkRequest, context: Context) -> activity_pb.EndWorkResponse:
        self._activity.end_work(request.token)
        return activity_pb.EndWorkResponse()

    async def WaitQuiescent(
        self, request: activity_pb.WaitQuiescentRequest, context: Context
    ) -> activity_pb.WaitQuiescentResponse:
        wait_seconds = max(0.0, request.wait_seconds)
        quiescent = await self._activity.wait_quiescent(request.rollout_only, wait_seconds)
        return activity_pb.WaitQuiescentResponse(quiescent=quiescent)

    async def ReportError(
        self, request: activity_pb.ReportErrorRequest, context: Context
    ) -> activity_pb.ReportErrorResponse:
        sent = request.error
        _require_names(**{"error.module": sent.module})
        report = ErrorReport(
            error_id=request.request_id,
            module=sent.module,
            work_context=sent.work_context,
            severity=_severity(sent.severity),
            message=sent.message,
            details=dict(sent.details),
            exception_type=sent.exception_type,
            exception_traceback=sent.exception_traceback,
        )
        return activity_pb.ReportErrorResponse(error_id=await self._controller.report_error(report))

    async def PostMetrics(
        self, request: activity_pb.PostMetricsRequest, context: Context
    ) -> activity_pb.PostMetricsResponse:
        _require_metrics(request.step, request.metrics)
        await self._controller.post_metrics(request.request_id, request.step, dict(request.metrics))
        return activity_pb.PostMetricsResponse()

    async def GetActivity(
        self, request: activity_pb.GetActivityRequest, context: Context
    ) -> activity_pb.GetActivityResponse:
        errors = self._controller.errors
        health = errors.health()
        return activity_pb.GetActivityResponse(
            modules=[self._module(module) for module in self._activity.modules],
            health=health.status,
            errors=[_error(report) for report in errors.newest(MAX_ERRORS_SHOWN)],
            summary=f"{health.message}\n{self._activity.summary()}",
            training_step=self._controller.state.step,
            recent_error_count=health.recent_error_count,
            error_level_count=health.error_level_count,
            warning_level_count=health.warning_level_count,
        )

    def _module(self, module: Module) -> activity_pb.Module:
        return activity_pb.Module(
            name=module.name,
            role=module.role,
            address=module.address,
            metrics_url=module.metrics_url,
            work=_work(list(module.work.values())),
            silent_seconds=self._activity.silent_seconds(module),
            alive=module.is_alive,
        )


def _work(pieces: Sequence[Work]) -> list[activity_pb.Work]:
    return [
        activity_pb.Work(
            token=piece.token,
            activity=piece.activity,
            start_unix_seconds=piece.start_unix_seconds,
            waiting_on=piece.waiting_on,
        )
        for piece in pieces
    ]


def _error(report: ErrorReport) -> activity_pb.ErrorReport:
    return activity_pb.ErrorReport(
        error_id=report.error_id,
        unix_seconds=report.unix_seconds,
        module=report.module,
        work_context=report.work_context,
        severity=activity_pb.Severity.Value(f"SEVERITY_{report.severity.name}"),
        message=report.message,
        details=report.details,
        exception_type=report.exception_type,
        exception_traceback=report.exception_traceback,
    )


def _severity(number: int) -> Severity:
    """Return the severity of a report; ERROR if the report does not set one."""
    if not 0 <= number <= Severity.CRITICAL:
        violation = Violation("error.severity", f"0 to {Severity.CRITICAL}, not {number}")
        raise InvalidArgumentError(str(violation), violations=[violation])
    return Severity(number or Severity.ERROR)


def _require_names(**names: str) -> None:
    violations = [
        Violation(name, f"1 to {MAX_NAME_CHARACTERS} characters, not {len(value)}")
        for name, value in names.items()
        if not 1 <= len(value) <= MAX_NAME_CHARACTERS
    ]
    if violations:
        raise InvalidArgumentError("; ".join(map(str, violations)), violations=violations)


def _require_metrics(step: int, metrics: Mapping[str, float]) -> None:
    violations = []
    if step < 0:
        violations.append(Violation("step", f"at least 0, not {step}"))
    if len(metrics) > MAX_METRICS:
        violations.append(Violation("metrics", f"at most {MAX_METRICS} names, not {len(metrics)}"))
    if violations:
        raise InvalidArgumentError("; ".join(map(str, violations)), violations=violations)
