"""The newest errors that components have reported, and the health that follows from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import islice

from nexrl.exception_text import MAX_MESSAGE_CHARACTERS, MAX_TRACEBACK_CHARACTERS

MAX_ERRORS = 1000
HEALTH_WINDOW_SECONDS = 300.0
MAX_DETAILS = 64


class Severity(IntEnum):
    """The severity of an error; the numbers are those of the protocol."""

    INFO = 1
    WARNING = 2
    ERROR = 3
    CRITICAL = 4


@dataclass(frozen=True)
class ErrorReport:
    """One error."""

    error_id: str
    """Unique. The sender chooses it, so that a report that is sent twice is kept once."""
    module: str
    work_context: str
    """What the module was doing."""
    severity: Severity
    message: str
    details: Mapping[str, str] = field(default_factory=dict)
    exception_type: str = ""
    exception_traceback: str = ""
    unix_seconds: float = 0.0
    """When the log recorded it."""


@dataclass(frozen=True)
class Health:
    """A summary of the errors of the last five minutes."""

    status: str
    """'healthy', 'warning' or 'error'."""
    message: str
    recent_error_count: int
    """Reports of any severity."""
    error_level_count: int
    """Reports of severity ERROR or CRITICAL."""
    warning_level_count: int


class ErrorLog:
    """The newest `limit` errors, in memory. The log files of the components contain all of them."""

    def __init__(self, now: Callable[[], float], limit: int = MAX_ERRORS) -> None:
        self._now = now
        self._limit = limit
        self._reports: dict[str, ErrorReport] = {}

    def record(self, report: ErrorReport) -> str:
        """Keep `report`, cut to the limits; returns its id. Idempotent by error id."""
        if report.error_id not in self._reports:
            self._reports[report.error_id] = replace(
                report,
                unix_seconds=self._now(),
                message=report.message[:MAX_MESSAGE_CHARACTERS],
                exception_traceback=report.exception_traceback[-MAX_TRACEBACK_CHARACTERS:],
                details=dict(islice(report.details.items(), MAX_DETAILS)),
            )
            if len(self._reports) > self._limit:
                del self._reports[next(iter(self._reports))]
        return report.error_id

    def newest(self, count: int) -> list[ErrorReport]:
        """Return the newest errors, newest first."""
        return list(islice(reversed(self._reports.values()), count))

    def health(self) -> Health:
        """Return the health that follows from the errors of the last five minutes."""
        since = self._now() - HEALTH_WINDOW_SECONDS
        recent = [report for report in self._reports.values() if report.unix_seconds > since]
        errors = sum(report.severity >= Severity.ERROR for report in recent)
        warnings = sum(report.severity is Severity.WARNING for report in recent)
        status = "error" if errors else "warning" if warnings else "healthy"
        message = (
            f"{status}: {errors} errors and {warnings} warnings in the last {HEALTH_WINDOW_SECONDS / 60:.0f} minutes"
        )
        return Health(status, message, len(recent), errors, warnings)
