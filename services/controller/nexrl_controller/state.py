"""The facts about one experiment, and the phase that follows from them.

The state contains facts (a version is committed, a component restarts, ...), never the phase itself. So nothing has to
remember the phase to return to after a restart or a validation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nexrl.errors import FailedPreconditionError
from nexrl.spec import ExperimentSpec
from nexrl.spec.monitor import FailurePolicySpec
from nexrl_controller.attempts import Window
from nexrl_controller.error_log import Severity

MIN_FAILURE_WINDOW = 128
WINDOW_BATCHES = 4
"""More samples than are usually in flight: all of those may fail once, if a replica or a judge is away for a while."""


class Phase(StrEnum):
    """The phase of an experiment."""

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
"""For each phase, the phases that may follow it."""

TERMINAL = frozenset({Phase.SUCCEEDED, Phase.FAILED})
"""Phases that no other phase follows."""


class IllegalTransitionError(FailedPreconditionError):
    """The experiment's phase does not allow the event."""


@dataclass(frozen=True)
class Rules:
    """When the experiment ends, according to its file."""

    total_steps: int
    """Optimizer steps after which training is finished."""
    validates: bool
    """Whether the last version must have been validated."""
    failure_policy: FailurePolicySpec
    """What the exit of a component leads to."""
    stop_severity: Severity | None
    """Lowest severity of an error that ends the experiment; None for never."""
    failure_window: int
    """Finished attempts at samples after which the share that failed is compared with the limit."""
    max_failure_ratio: float | None
    """The share of failed attempts that ends the experiment; None for never."""

    @staticmethod
    def of(spec: ExperimentSpec) -> "Rules":
        """Return the rules of `spec`."""
        errors = spec.monitor.errors
        severities = {"stop_on_error": Severity.ERROR, "stop_on_critical": Severity.CRITICAL, "continue": None}
        stop_severity = severities[errors.policy] if errors.enabled else None
        return Rules(
            total_steps=spec.trainer.steps,
            validates=spec.validation is not None,
            failure_policy=spec.failure_policy,
            stop_severity=stop_severity,
            # Twice those in flight: a wave of attempts that fail together, such as those that were sampled with a
            # version that Redis lost, must not fill the window.
            failure_window=max(
                MIN_FAILURE_WINDOW,
                WINDOW_BATCHES * spec.trajectory_pool.batch_size,
                2 * spec.rollout.replicas * spec.rollout.workers,
            ),
            max_failure_ratio=None if stop_severity is None else spec.rollout.max_failure_ratio,
        )


@dataclass(frozen=True)
class Verdict:
    """What to do about a component whose process has ended."""

    restart: bool
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class ExitRecord:
    """The newest exit of one component; a repeated report of it gets the same answer."""

    request_id: str = ""
    restarts: int = 0
    """Restarts of the component so far."""
    counted: int = 0
    """Those that count for `failurePolicy.maxRestarts`: since the newest checkpoint at the last exit."""
    checkpointed_steps: int = 0
    """The steps in that checkpoint."""
    in_a_row: int = 0
    """The restarts without a training step between them."""
    step: int = 0
    """Optimizer steps made at the last exit."""
    verdict: Verdict = Verdict(restart=False)


@dataclass(frozen=True)
class State:
    """The facts about one experiment. All of them are persisted."""

    start_unix_seconds: float
    reason: str = "Accepted"
    """The reason for its phase, in one word."""
    message: str = "no component is running yet"
    """The reason for its phase, for people."""
    is_started: bool = False
    is_suspended: bool = False
    has_version: bool = False
    """True once a policy version was committed after the start."""
    policy_version: int = -1
    """The committed version; -1 for none."""
    validating_version: int | None = None
    validated_version: int = -1
    """The newest version whose validation has ended, with success or not; -1 for none."""
    restarting: frozenset[str] = frozenset()
    """Components that have ended and have sent no heartbeat since."""
    exits: Mapping[str, ExitRecord] = field(default_factory=dict)
    """By component."""
    step: int = 0
    """Optimizer steps made."""
    checkpointed_steps: int = 0
    """Optimizer steps in the newest checkpoint."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each metric."""
    is_trained: bool = False
    """True once the trainer has written its last checkpoint."""
    outcome: Phase | None = None
    """SUCCEEDED or FAILED once that is decided."""
    attempts: Window | None = None
    """Attempts at samples that finished last; None before the first count."""
    failing_samples: str = ""
    """Which share of the attempts fails, the last failure and what to do, for people; empty while few fail."""
    has_ended: bool = False
    """True once its components have stopped."""
    generation: int = 0
    """`Experiment.generation` when it was started or resumed last."""

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

    def resumed(self, new: "State") -> "State":
        """Return the state after a suspension: with all restarts left, and that of `new` if it had failed."""
        exits = {name: replace(record, counted=0, in_a_row=0, step=0) for name, record in self.exits.items()}
        return replace(new if self.outcome is Phase.FAILED else self, generation=new.generation, exits=exits)

    def ending(self, outcome: Phase, reason: str, message: str) -> "State":
        """Return the state with its outcome decided. The components stop now."""
        return replace(self, outcome=outcome, validating_version=None, reason=reason, message=message)
