"""Typed errors: what a caller can act on. Anything else crashes the process, and its supervisor restarts it.

`status` is the name of the gRPC status code that `nexrl.rpc` sends for the error, and turns back into the
same class on the client's side. `exit_code` is what a command line ends with (docs/exit-codes.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Violation:
    """One field that is wrong: its path, and what is allowed there."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class NexrlError(Exception):
    """Root of all typed errors. `retry_after_seconds` tells a client when trying again may help."""

    status: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, violations: Sequence[Violation] = (), retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_seconds = retry_after_seconds


class InvalidArgumentError(NexrlError):
    """The request can never succeed as it is."""

    status = "INVALID_ARGUMENT"
    exit_code = 2


class NotFoundError(NexrlError):
    """The thing named does not exist."""

    status = "NOT_FOUND"
    exit_code = 3


class AlreadyExistsError(NexrlError):
    """Another thing of that name exists, with other content."""

    status = "ALREADY_EXISTS"
    exit_code = 3


class FailedPreconditionError(NexrlError):
    """The system is not in the state that the request needs; the caller must change something first."""

    status = "FAILED_PRECONDITION"
    exit_code = 4


class LeaseLostError(FailedPreconditionError):
    """The lease ran out, was given to someone else, or is one that the store has lost: the late write is fenced off."""

    status = "ABORTED"
    exit_code = 8


class ResourceExhaustedError(NexrlError):
    """A limit is reached; wait `retry_after_seconds` and try again."""

    status = "RESOURCE_EXHAUSTED"
    exit_code = 5


class UnavailableError(NexrlError):
    """A peer cannot be reached now."""

    status = "UNAVAILABLE"
    exit_code = 6


class DeadlineExceededError(NexrlError):
    """The time given was not enough."""

    status = "DEADLINE_EXCEEDED"
    exit_code = 7


class UnauthenticatedError(NexrlError):
    """The caller shows neither a certificate nor a token that is good."""

    status = "UNAUTHENTICATED"
    exit_code = 9


class PermissionDeniedError(NexrlError):
    """The caller is known, and belongs to another experiment."""

    status = "PERMISSION_DENIED"
    exit_code = 9


class TrainingFailedError(NexrlError):
    """The experiment ended in phase Failed; the message is the controller's reason."""

    exit_code = 10


class CheckFailedError(NexrlError):
    """What was to be shown does not hold: a replay differs from its record, or a ledger does not balance."""

    exit_code = 11


def error_class(status: str) -> type[NexrlError]:
    """The class whose gRPC status is `status`; NexrlError for one that has no class."""
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
