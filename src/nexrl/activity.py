"""What this process is doing: work in flight, reported to the controller with a heartbeat, and its errors."""

import asyncio
import logging
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc

from nexrl.errors import NexrlError
from nexrl.rpc.client import call, new_request_id
from nexrl.v1 import activity_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
RETRY_SECONDS = 1.0
LAST_SECONDS = 2.0


class ActivityTracker:
    """The work of one module. Without a channel (in tests, or when the controller is the module) nothing is sent."""

    def __init__(self, module: pb.Module, channel: grpc.aio.Channel | None) -> None:
        self._module = module
        self._work: dict[str, pb.Work] = {}
        self._stub = ActivityServiceStub(channel) if channel else None
        self._reports: set[asyncio.Task[str]] = set()
        self._last_error: Exception | None = None

    @property
    def module_name(self) -> str:
        """Name of the module, as 'rollout-0'."""
        return self._module.name

    @contextmanager
    def track(self, activity: str, waiting_on: str = "") -> Iterator[None]:
        """Count `activity` as in flight while the block runs. `waiting_on` names the component it waits for.

        An exception that leaves the block is reported, once, and goes on its way; cancellation is no error. To be used
        in the event loop, where the report is sent.
        """
        token = new_request_id()
        self._work[token] = pb.Work(
            token=token, activity=activity, start_unix_seconds=time.time(), waiting_on=waiting_on
        )
        try:
            yield
        except Exception as error:
            if error is not self._last_error:  # not reported yet by a block within this one
                self._last_error = error
                self._report_soon(error, activity)
            raise
        finally:
            del self._work[token]

    def _report_soon(self, error: Exception, activity: str) -> None:
        report = asyncio.get_running_loop().create_task(self.report(error, work_context=activity))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def reports_sent(self) -> None:
        """Return when the reports of `track` have been sent, or could not be."""
        if self._reports:
            await asyncio.wait(self._reports, timeout=CALL_SECONDS)

    def is_quiescent(self) -> bool:
        """True when nothing is in flight."""
        return not self._work

    def snapshot(self) -> pb.Module:
        """The module with its work in flight."""
        module = pb.Module()
        module.CopyFrom(self._module)
        module.work.extend(self._work.values())
        return module

    async def report(
        self,
        error: BaseException | str,
        *,
        work_context: str,
        severity: "pb.Severity.ValueType" = pb.SEVERITY_ERROR,
        details: Mapping[str, str] | None = None,
    ) -> str:
        """Send an error to the controller; gives its id, or "" when it cannot be told (the error is logged here)."""
        report = pb.ErrorReport(
            module=self.module_name,
            work_context=work_context,
            severity=severity,
            message=str(error) or type(error).__name__,
            details=details or {},
        )
        if isinstance(error, BaseException):
            report.exception_type = type(error).__name__
            report.exception_traceback = "".join(traceback.format_exception(error))
        log.log(
            logging.WARNING if severity <= pb.SEVERITY_WARNING else logging.ERROR,
            "%s: %s",
            work_context,
            report.message,
        )
        if self._stub is None:
            return ""
        try:
            request = pb.ReportErrorRequest(request_id=new_request_id(), error=report)
            return (await call(self._stub.ReportError, request, timeout_seconds=CALL_SECONDS)).error_id
        except NexrlError as unsent:
            log.warning("the controller could not be told: %s", unsent)
            return ""

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of `step` with the experiment's logging backends."""
        if self._stub is not None:
            request = pb.PostMetricsRequest(request_id=new_request_id(), step=step, metrics=metrics)
            await call(self._stub.PostMetrics, request, timeout_seconds=60)

    async def send_last_heartbeat(self) -> None:
        """Say that this process ends in order; a controller that cannot be told now takes it for silent later."""
        if self._stub is None:
            return
        try:
            await self._stub.Heartbeat(pb.HeartbeatRequest(module=self._module, ends=True), timeout=LAST_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("last heartbeat: %s", error.details())

    async def send_heartbeats(self) -> None:
        """Report this module for as long as the task lives."""
        while self._stub is not None:
            try:
                request = pb.HeartbeatRequest(module=self.snapshot())
                answer = await call(self._stub.Heartbeat, request, timeout_seconds=CALL_SECONDS)
                await asyncio.sleep(answer.interval_seconds)
            except NexrlError as error:
                log.warning("heartbeat: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
