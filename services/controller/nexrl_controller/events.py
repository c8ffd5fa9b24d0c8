"""The events in the life of an experiment. The method `after` of each returns the state with the facts that it changes.

Call `lifecycle.advance` instead: it also decides when an experiment is complete, and refuses illegal transitions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from signal import Signals
from typing import Protocol

from nexrl.errors import InvalidArgumentError, explain_exit
from nexrl.restarts import action_after, backoff_seconds
from nexrl_controller.attempts import Count, FailedAttempt, is_reported, moved, reaches, report
from nexrl_controller.error_log import Severity
from nexrl_controller.state import ExitRecord, IllegalTransitionError, Phase, Rules, State, Verdict

TRAINING_COMPLETE = "training_complete"
"""The trainer posts a metric of this name when its last checkpoint is written."""
CHECKPOINTED_STEPS = "checkpointed_steps"
"""The trainer posts a metric of this name with each step: how many steps its newest checkpoint contains."""

STALLED = "Stalled"
MAX_METRICS = 1000
MAX_LOG_LINES = 20
MAX_LOG_CHARACTERS = 4000
MAX_LAST_WORDS = 400


class Event(Protocol):
    """One event."""

    def after(self, state: State, rules: Rules) -> State:
        """Return the state after the event. Raises IllegalTransitionError if `state` does not allow the event."""


@dataclass(frozen=True)
class Started:
    """The controller's process has started, for the first time or again."""

    is_suspended: bool
    """The experiment's `spec.suspend`."""

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None:
            return state
        # User code may have been repaired during a suspension, of which the controller of a cluster does not know.
        state = replace(state, attempts=None, failing_samples="")
        if not self.is_suspended:
            message = "waiting for the first committed policy version"
            return replace(state, is_started=True, is_suspended=False, reason="ComponentsStarting", message=message)
        # The components that ran before the pause start from scratch after it.
        return replace(
            state,
            is_started=True,
            is_suspended=True,
            has_version=False,
            validating_version=None,
            restarting=frozenset(),
            reason="Suspended",
            message="spec.suspend is true",
        )


@dataclass(frozen=True)
class VersionCommitted:
    """Replicas serve policy version `version`."""

    version: int

    def after(self, state: State, rules: Rules) -> State:
        _require(state.phase not in (Phase.PENDING, Phase.SUSPENDED), state, self)
        message = f"policy version {self.version} is committed"
        return replace(state, has_version=True, policy_version=self.version, reason="Training", message=message)


@dataclass(frozen=True)
class ValidationStarted:
    """The validation of the committed version `version` has started."""

    version: int

    def after(self, state: State, rules: Rules) -> State:
        _require(state.outcome is None and not state.is_suspended and state.has_version, state, self)
        _require(state.validating_version in (None, self.version) and self.version <= state.policy_version, state, self)
        message = f"policy version {self.version} is being validated"
        return replace(state, validating_version=self.version, reason="ValidationDue", message=message)


@dataclass(frozen=True)
class ValidationEnded:
    """The validation of `version` has ended, with success or not."""

    version: int

    def after(self, state: State, rules: Rules) -> State:
        _require(state.validating_version == self.version, state, self)
        validated = max(self.version, state.validated_version)
        message = f"policy version {self.version} was validated"
        return replace(state, validating_version=None, validated_version=validated, reason="Training", message=message)


@dataclass(frozen=True)
class FoundValidated:
    """A resumed run has found `version` committed and not held: all validations up to it were made."""

    version: int

    def after(self, state: State, rules: Rules) -> State:
        return replace(state, validating_version=None, validated_version=max(self.version, state.validated_version))


@dataclass(frozen=True)
class MetricsPosted:
    """A component has posted metrics that were measured after `step` optimizer steps."""

    step: int
    metrics: Mapping[str, float]

    def after(self, state: State, rules: Rules) -> State:
        fresh = {name: value for name, value in self.metrics.items() if name != TRAINING_COMPLETE}
        older = [(name, value) for name, value in state.metrics.items() if name not in fresh]
        is_stalled = state.reason == STALLED
        after = replace(
            state,
            step=max(state.step, self.step),
            metrics=dict([*older, *fresh.items()][-MAX_METRICS:]),
            checkpointed_steps=max(state.checkpointed_steps, int(self.metrics.get(CHECKPOINTED_STEPS, 0))),
            is_trained=state.is_trained or TRAINING_COMPLETE in self.metrics,
            reason="Training" if is_stalled else state.reason,
            message="training continues" if is_stalled else state.message,
        )
        if after.is_trained and after.step < rules.total_steps and after.outcome is None:
            message = f"the data ended after {after.step} of {rules.total_steps} steps"
            return after.ending(Phase.SUCCEEDED, "DataExhausted", message)
        return after


@dataclass(frozen=True)
class ComponentAlive:
    """`component` has sent a heartbeat."""

    component: str

    def after(self, state: State, rules: Rules) -> State:
        message = f"{self.component} is alive again"
        return replace(state, restarting=state.restarting - {self.component}, reason="ComponentAlive", message=message)


@dataclass(frozen=True)
class ComponentExited:
    """The process of `component` has ended. The verdict is in the state's `exits`."""

    request_id: str
    """Not empty. A repeated report changes nothing."""
    component: str
    exit_code: int
    """Negative for the signal that ended it."""
    log_tail: str

    def after(self, state: State, rules: Rules) -> State:
        last = state.exits.get(self.component, ExitRecord())
        if last.request_id == self.request_id:
            return state
        if state.outcome is not None or state.is_suspended or (state.is_trained and self.exit_code == 0):
            return self._recorded(state, last, Verdict(restart=False))
        policy = rules.failure_policy
        action = action_after(policy, self.component, self.exit_code)
        if action == "Fail" and self.exit_code == InvalidArgumentError.exit_code:
            why = "its configuration is wrong, so it is not restarted"
            return self._failed(state, last, "BadConfiguration", why)
        if action == "Fail":
            return self._failed(state, last, "ComponentFailed", "failurePolicy.rules says Fail for this exit code")
        if state.checkpointed_steps > last.checkpointed_steps:
            last = replace(last, checkpointed_steps=state.checkpointed_steps, counted=0)
        if action == "Ignore":
            return self._restarted(state, last, "a restart after this exit code is not counted")
        if last.counted >= policy.max_restarts:
            limit = f"{last.counted} times without a new checkpoint, the limit of failurePolicy.maxRestarts"
            return self._failed(state, last, "ComponentFailed", f"it was restarted {limit}")
        last = replace(last, counted=last.counted + 1)
        return self._restarted(state, last, f"restart {last.counted} of {policy.max_restarts} without a new checkpoint")

    def _recorded(self, state: State, last: ExitRecord, verdict: Verdict) -> State:
        record = replace(last, request_id=self.request_id, verdict=verdict)
        return replace(state, exits={**state.exits, self.component: record})

    def _failed(self, state: State, last: ExitRecord, reason: str, why: str) -> State:
        lines = self.log_tail.strip().splitlines()[-MAX_LOG_LINES:]
        # kubectl shows only the first line of a message.
        message = f"{self._ending()}{self._last_words()}; {why}"
        if len(lines) > 1:
            message += ". Last lines of its log:\n" + "\n".join(lines)[-MAX_LOG_CHARACTERS:]
        state = self._recorded(state, last, Verdict(restart=False))
        return state.ending(Phase.FAILED, reason, message)

    def _restarted(self, state: State, last: ExitRecord, count: str) -> State:
        # Progress resets the backoff: in a long run a component may fail now and then. A heartbeat does not, because a
        # component that fails in its first step sends one before.
        in_a_row = 1 if state.step > last.step else last.in_a_row + 1
        delay_seconds = backoff_seconds(in_a_row)
        words = self._last_words() if self.exit_code > 0 else ""  # a process that is killed does not say why
        last = replace(last, restarts=last.restarts + 1, in_a_row=in_a_row, step=state.step)
        return replace(
            self._recorded(state, last, Verdict(restart=True, delay_seconds=delay_seconds)),
            restarting=state.restarting | {self.component},
            reason="ComponentExited",
            message=f"{self._ending()}{words}; it restarts in {delay_seconds:g} s; {count}",
        )

    def _last_words(self) -> str:
        return "".join(f": {line[:MAX_LAST_WORDS]}" for line in self.log_tail.strip().splitlines()[-1:])

    def _ending(self) -> str:
        if self.exit_code >= 0:
            return f"{self.component} ended with exit code {self.exit_code}{explain_exit(self.exit_code)}"
        names = {int(signal): signal.name for signal in Signals}
        name = names.get(-self.exit_code, f"signal {-self.exit_code}")
        return f"{self.component} was ended by {name}{explain_exit(self.exit_code)}"


@dataclass(frozen=True)
class ErrorReported:
    """A component has reported an error."""

    severity: Severity
    module: str
    message: str

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None or rules.stop_severity is None or self.severity < rules.stop_severity:
            return state
        reason = "CriticalError" if self.severity is Severity.CRITICAL else "ErrorReported"
        return state.ending(Phase.FAILED, reason, f"{self.module}: {self.message}")


@dataclass(frozen=True)
class AttemptsCounted:
    """The trajectory pool has counted the attempts at samples."""

    count: Count
    last_failure: FailedAttempt | None

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None or state.is_suspended:
            return state
        window = moved(state.attempts, self.count, rules.failure_window)
        told = report(window, self.last_failure) if self.last_failure else ""
        state = replace(state, attempts=window, failing_samples=told if is_reported(window) else "")
        limit = rules.max_failure_ratio
        if limit is None or not reaches(window, rules.failure_window, limit):
            return state
        return state.ending(Phase.FAILED, "SamplesFailing", f"{told}; the limit is rollout.maxFailureRatio, {limit:g}")


@dataclass(frozen=True)
class Stalled:
    """No component makes progress; `message` names the edge that blocks."""

    message: str

    def after(self, state: State, rules: Rules) -> State:
        if state.phase not in (Phase.STARTING, Phase.RUNNING, Phase.VALIDATING):
            return state
        return replace(state, reason=STALLED, message=self.message)


@dataclass(frozen=True)
class StallDeadlineExceeded:
    """No training step was made for too long; `message` says for how long, and what blocks."""

    message: str

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None or state.is_suspended:
            return state
        return state.ending(Phase.FAILED, "StallDeadlineExceeded", self.message)


@dataclass(frozen=True)
class StopRequested:
    """The user stops the experiment; `why` is for people."""

    why: str

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None:
            return state
        outcome = Phase.SUCCEEDED if state.is_trained else Phase.FAILED
        return state.ending(outcome, "Stopped", self.why or "the user stopped it")


@dataclass(frozen=True)
class ComponentsStopped:
    """All components have stopped."""

    def after(self, state: State, rules: Rules) -> State:
        _require(state.outcome is not None, state, self)
        return replace(state, has_ended=True)


def _require(condition: bool, state: State, event: Event) -> None:
    if not condition:
        raise IllegalTransitionError(f"{event}: not allowed in phase {state.phase} ({state.reason})")
