"""What is known about one experiment, and the phase that follows from it.

The state holds facts (a version is committed, a component restarts, ...), never the phase itself. So nothing has to
remember what to go back to when a restart or a validation is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nexrl.errors import FailedPreconditionError
from nexrl.spec import ExperimentSpec
from nexrl_controller.error_log import Severity


class Phase(StrEnum):
    """Where an experiment is in its life."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    VALIDATING = "Validating"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    RESTARTING = "Restarting"


_ANY_TIME = frozenset({Phase.RESTARTING, Phase.STOPPING, Phase.SUSPENDED})
LEGAL: Mapping[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.STARTING, Phase.STOPPING, Phase.SUSPENDED}),
    Phase.STARTING: _ANY_TIME | {Phase.RUNNING},
    Phase.RUNNING: _ANY_TIME | {Phase.VALIDATING},
    Phase.VALIDATING: _ANY_TIME | {Phase.RUNNING},
    Phase.RESTARTING: _ANY_TIME - {Phase.RESTARTING} | {Phase.STARTING, Phase.RUNNING, Phase.VALIDATING},
    Phase.SUSPENDED: frozenset({Phase.STARTING, Phase.STOPPING}),
    Phase.STOPPING: frozenset({Phase.SUCCEEDED, Phase.FAILED}),
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
}
"""The phases that may follow each phase."""

TERMINAL = frozenset({Phase.SUCCEEDED, Phase.FAILED})
"""Phases that nothing follows."""


class IllegalTransitionError(FailedPreconditionError):
    """The event makes no sense in the experiment's phase."""


@dataclass(frozen=True)
class Rules:
    """What the experiment file says about its own end."""

    total_steps: int
    """Optimizer steps after which training is finished."""
    validates: bool
    """Whether the last version must have been validated."""
    max_restarts: int
    """Restarts of each component before the experiment fails."""
    stop_severity: Severity | None
    """Lowest severity of an error that ends the experiment; None for never."""

    @staticmethod
    def of(spec: ExperimentSpec) -> "Rules":
        """The rules of `spec`."""
        errors = spec.monitor.errors
        severities = {"stop_on_error": Severity.ERROR, "stop_on_critical": Severity.CRITICAL, "continue": None}
        return Rules(
            total_steps=spec.trainer.steps,
            validates=spec.validation is not None,
            max_restarts=spec.failure_policy.max_restarts,
            stop_severity=severities[errors.policy] if errors.enabled else None,
        )


@dataclass(frozen=True)
class Verdict:
    """What to do about a component whose process has ended."""

    restart: bool
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class ExitRecord:
    """The newest end of one component, kept so that a repeated report gets the same answer."""

    request_id: str = ""
    restarts: int = 0
    """Restarts of the component so far."""
    in_a_row: int = 0
    """Those of them since it was last heard of."""
    verdict: Verdict = Verdict(restart=False)


@dataclass(frozen=True)
class State:
    """The facts about one experiment. All of them are persisted."""

    start_unix_seconds: float
    reason: str = "Accepted"
    """Why it is in its phase, in one word."""
    message: str = "nothing runs yet"
    """Why it is in its phase, for people."""
    is_started: bool = False
    is_suspended: bool = False
    has_version: bool = False
    """True once a policy version was committed after the start."""
    policy_version: int = -1
    """The committed version; -1 for none."""
    validating_version: int | None = None
    validated_version: int = -1
    """The newest version whose validation has ended, well or not; -1 for none."""
    restarting: frozenset[str] = frozenset()
    """Components that have ended and were not heard of since."""
    exits: Mapping[str, ExitRecord] = field(default_factory=dict)
    """By component."""
    step: int = 0
    """Optimizer steps made."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each metric."""
    is_trained: bool = False
    """True once the trainer has written its last checkpoint."""
    outcome: Phase | None = None
    """How it ends, once that is decided: SUCCEEDED or FAILED."""
    has_ended: bool = False
    """True once its components have stopped."""

    @property
    def phase(self) -> Phase:
        """The phase that follows from the facts."""
        if self.outcome is not None:
            return self.outcome if self.has_ended else Phase.STOPPING
        if not self.is_started:
            return Phase.PENDING
        if self.is_suspended:
            return Phase.SUSPENDED
        if self.restarting:
            return Phase.RESTARTING
        if self.validating_version is not None:
            return Phase.VALIDATING
        return Phase.RUNNING if self.has_version else Phase.STARTING

    @property
    def restarts(self) -> int:
        """Restarts of all components so far."""
        return sum(record.restarts for record in self.exits.values())

    def ending(self, outcome: Phase, reason: str, message: str) -> "State":
        """The state with its outcome decided: the components stop now."""
        return replace(self, outcome=outcome, validating_version=None, reason=reason, message=message)
