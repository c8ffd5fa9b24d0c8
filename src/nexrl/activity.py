"""Tracks the work of this process and reports it, with heartbeats and errors, to the controller."""

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Iterator, Mapping

import grpc

from nexrl.errors import NexrlError
from nexrl.exception_text import MAX_MESSAGE_CHARACTERS, MAX_TRACEBACK_CHARACTERS
from nexrl.metrics_file import MetricsFile
from nexrl.rpc.client import call, new_request_id
from nexrl.v1 import activity_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
RETRY_SECONDS = 1.0
LAST_SECONDS = 2.0
MIN_HEARTBEAT_SECONDS = 0.5
"""Shortest time between two heartbeats. It limits a process that alternates between idle and busy to two per second."""


class ActivityTracker:
    """Tracks the work in flight of one module, and reports it to the controller.

    A heartbeat is sent at once when the module becomes busy or idle, because ActivityService.WaitQuiescent waits for
    that. While the module stays busy, other changes of its work are part of the next regular heartbeat. Without a
    channel nothing is sent; tests and the controller itself have none.
    """

    def __init__(
        self, module: pb.Module, channel: grpc.aio.Channel | None, metrics_file: MetricsFile | None = None
    ) -> None:
        """`metrics_file` gets the metrics of this process, for a controller that has no lasting folder."""
        self._metrics_file = metrics_file
        self._module = module
        self._work: dict[str, pb.Work] = {}
        self._stub = ActivityServiceStub(channel) if channel else None
        self._reports: set[asyncio.Task[str]] = set()
        self._last_error: Exception | None = None
        self._was_idle_when_reported = True
        self._changed = asyncio.Event()

    @property
    def module_name(self) -> str:
        """Name of the module, for example 'rollout-0'."""
        return self._module.name

    @contextlib.contextmanager
    def track(self, activity: str, waiting_on: str = "") -> Iterator[None]:
        """Count `activity` as in flight while the block runs, as `in_flight` does, and report what it raises.

        An exception that leaves the block is reported once and raised again. Cancellation is not an error. Call this
        from the event loop, because the reports are sent in tasks of the running loop.
        """
        with self.in_flight(activity, waiting_on):
            try:
                yield
            except Exception as error:
                if error is not self._last_error:  # an inner block has not reported it yet
                    self._last_error = error
                    self._report_soon(error, activity)
                raise

    @contextlib.contextmanager
    def in_flight(self, activity: str, waiting_on: str = "") -> Iterator[None]:
        """Count `activity` as in flight while the block runs. Exceptions are the caller's to report.

        `waiting_on` names the component, or the code of the user, that it waits for.
        """
        token = new_request_id()
        self._work[token] = pb.Work(
            token=token, activity=activity, start_unix_seconds=time.time(), waiting_on=waiting_on
        )
        self._changed.set()
        try:
            yield
        finally:
            del self._work[token]
            self._changed.set()

    def _report_soon(self, error: Exception, activity: str) -> None:
        report = asyncio.get_running_loop().create_task(self.report(error, work_context=activity))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def reports_sent(self) -> None:
        """Wait until each report of `track` has been sent or has failed, at most CALL_SECONDS."""
        if self._reports:
            await asyncio.wait(self._reports, timeout=CALL_SECONDS)

    def is_quiescent(self) -> bool:
        """Return whether nothing is in flight."""
        return not self._work

    def snapshot(self) -> pb.Module:
        """Return the module with its work in flight."""
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
        """Log an error and send it to the controller. Return its id, or "" if the controller cannot be reached."""
        report = pb.ErrorReport(
            module=self.module_name,
            work_context=work_context,
            severity=severity,
            message=(str(error) or type(error).__name__)[:MAX_MESSAGE_CHARACTERS],
            details=details or {},
        )
        if isinstance(error, BaseException):
            report.exception_type = type(error).__name__
            report.exception_traceback = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]
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
            log.warning("the error could not be sent to the controller: %s", unsent)
            return ""

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics of `step` to the logging backends of the experiment."""
        if self._metrics_file is not None:
            self._metrics_file.post(step, time.time(), metrics)
        if self._stub is not None:
            request = pb.PostMetricsRequest(request_id=new_request_id(), step=step, metrics=metrics)
            await call(self._stub.PostMetrics, request, timeout_seconds=60)

    async def send_last_heartbeat(self) -> None:
        """Tell the controller that this process stops on purpose, so that missing heartbeats are not an error."""
        if self._stub is None:
            return
        try:
            await self._stub.Heartbeat(pb.HeartbeatRequest(module=self._module, ends=True), timeout=LAST_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("the last heartbeat could not be sent: %s", error.details())

    async def send_heartbeats(self) -> None:
        """Send heartbeats until cancelled: at the controller's interval, and when the module becomes busy or idle."""
        while self._stub is not None:
            try:
                self._was_idle_when_reported = self.is_quiescent()
                request = pb.HeartbeatRequest(module=self.snapshot())
                answer = await call(self._stub.Heartbeat, request, timeout_seconds=CALL_SECONDS)
                await self._wait_until_due(answer.interval_seconds)
            except NexrlError as error:
                log.warning("a heartbeat could not be sent: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _wait_until_due(self, seconds: float) -> None:
        """Wait `seconds`, or less if the module becomes busy or idle, but at least MIN_HEARTBEAT_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.sleep(MIN_HEARTBEAT_SECONDS)
                while self.is_quiescent() == self._was_idle_when_reported:
                    self._changed.clear()
                    await self._changed.wait()
