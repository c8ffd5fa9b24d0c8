"""Typed errors: the errors that a caller can act on. Any other exception crashes the process, which is restarted.

`status` names the gRPC status code of the error: `nexrl.rpc` sends it and restores the class at the client.
`exit_code` is the exit code of a command that fails with the error (docs/exit-codes.md).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from signal import Signals
from typing import ClassVar


@dataclass(frozen=True)
class Violation:
    """One wrong field: its path, and what is wrong or allowed."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class NexrlError(Exception):
    """Base of all typed errors. `retry_after_seconds` says after which time a retry may succeed."""

    status: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, violations: Sequence[Violation] = (), retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_seconds = retry_after_seconds


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Add `field` to the message of an error that code raises which does not know for which field it is called."""
    try:
        yield
    except NexrlError as error:
        raise type(error)(f"{field}: {error.message}") from error


class InvalidArgumentError(NexrlError):
    """The request is wrong: a retry cannot succeed."""

    status = "INVALID_ARGUMENT"
    exit_code = 2


class NotFoundError(NexrlError):
    """The named object does not exist."""

    status = "NOT_FOUND"
    exit_code = 3


class AlreadyExistsError(NexrlError):
    """An object of this name exists with other content."""

    status = "ALREADY_EXISTS"
    exit_code = 3


class FailedPreconditionError(NexrlError):
    """The system is not in the state that the request requires. The caller must change that first."""

    status = "FAILED_PRECONDITION"
    exit_code = 4


class LeaseLostError(FailedPreconditionError):
    """The lease has expired, belongs to another worker, or was lost by the store. The write is refused."""

    status = "ABORTED"
    exit_code = 8


class ResourceExhaustedError(NexrlError):
    """A limit is reached. Retry after `retry_after_seconds`."""

    status = "RESOURCE_EXHAUSTED"
    exit_code = 5


class UnavailableError(NexrlError):
    """A peer cannot be reached. A retry may succeed."""

    status = "UNAVAILABLE"
    exit_code = 6


class DeadlineExceededError(NexrlError):
    """The deadline passed first."""

    status = "DEADLINE_EXCEEDED"
    exit_code = 7


class UnauthenticatedError(NexrlError):
    """The caller has neither a valid certificate nor a valid token."""

    status = "UNAUTHENTICATED"
    exit_code = 9


class PermissionDeniedError(NexrlError):
    """The caller is authenticated but belongs to another experiment."""

    status = "PERMISSION_DENIED"
    exit_code = 9


class TrainingFailedError(NexrlError):
    """The experiment ended in phase Failed. The message is the controller's reason."""

    exit_code = 10


class CheckFailedError(NexrlError):
    """A check failed: a replay differs from its record, or a ledger does not balance."""

    exit_code = 11


EXIT_CODES = range(CheckFailedError.exit_code + 1)
"""The exit codes of our processes."""


def explain_exit(exit_code: int) -> str:
    """Return what people should know of an exit code that is none of ours; "" for ours. Negative: a signal."""
    if exit_code == -int(Signals.SIGKILL):
        return "; unless somebody killed it, it used too much memory or disk"
    if exit_code == -int(Signals.SIGABRT):
        return "; a library aborted, perhaps because no more processes were allowed (podPidsLimit)"
    if exit_code in EXIT_CODES or exit_code < 0:
        return ""
    return ", which is none of NexRL: your code or a library ended the process"


def error_class(status: str) -> type[NexrlError]:
    """Return the class of a gRPC status; NexrlError for a status without a class."""
    classes: list[type[NexrlError]] = [
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        LeaseLostError,
        ResourceExhaustedError,
        UnavailableError,
        DeadlineExceededError,
        UnauthenticatedError,
        PermissionDeniedError,
    ]
    return next((cls for cls in classes if cls.status == status), NexrlError)
