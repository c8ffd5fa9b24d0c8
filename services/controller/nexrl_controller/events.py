"""What can happen to an experiment: each event knows the facts that it changes (`after`).

Use `lifecycle.advance`, which also decides when an experiment is complete and refuses what is illegal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from signal import Signals
from typing import Protocol

from nexrl.errors import InvalidArgumentError
from nexrl_controller.error_log import Severity
from nexrl_controller.state import ExitRecord, IllegalTransitionError, Phase, Rules, State, Verdict

TRAINING_COMPLETE = "training_complete"
"""Name of the metric with which the trainer says that its last checkpoint is written."""

STALLED = "Stalled"
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
MAX_METRICS = 1000
MAX_LOG_LINES = 20
MAX_LOG_CHARACTERS = 4000


class Event(Protocol):
    """Something that happened."""

    def after(self, state: State, rules: Rules) -> State:
        """The state after the event. Raises IllegalTransitionError when the event makes no sense in `state`."""


@dataclass(frozen=True)
class Started:
    """The controller's process began, for the first time or again."""

    is_suspended: bool
    """The experiment's `spec.suspend`."""

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None:
            return state
        if not self.is_suspended:
            message = "waiting for the first committed policy version"
            return replace(state, is_started=True, is_suspended=False, reason="ComponentsStarting", message=message)
        # What ran before the pause comes back as a fresh start.
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
    """The committed version `version` is measured from now on."""

    version: int

    def after(self, state: State, rules: Rules) -> State:
        _require(state.outcome is None and not state.is_suspended and state.has_version, state, self)
        _require(state.validating_version in (None, self.version) and self.version <= state.policy_version, state, self)
        message = f"policy version {self.version} is measured"
        return replace(state, validating_version=self.version, reason="ValidationDue", message=message)


@dataclass(frozen=True)
class ValidationEnded:
    """The measurement of `version` is over, well or not."""

    version: int

    def after(self, state: State, rules: Rules) -> State:
        _require(state.validating_version == self.version, state, self)
        validated = max(self.version, state.validated_version)
        message = f"policy version {self.version} was measured"
        return replace(state, validating_version=None, validated_version=validated, reason="Training", message=message)


@dataclass(frozen=True)
class FoundValidated:
    """A run that goes on has found `version` committed and not held: whatever was due up to it has been measured."""

    version: int

    def after(self, state: State, rules: Rules) -> State:
        return replace(state, validating_version=None, validated_version=max(self.version, state.validated_version))


@dataclass(frozen=True)
class MetricsPosted:
    """A component gave metrics, measured after `step` optimizer steps."""

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
            is_trained=state.is_trained or TRAINING_COMPLETE in self.metrics,
            reason="Training" if is_stalled else state.reason,
            message="training goes on" if is_stalled else state.message,
        )
        if after.is_trained and after.step < rules.total_steps and after.outcome is None:
            message = f"the data ended after {after.step} of {rules.total_steps} steps"
            return after.ending(Phase.SUCCEEDED, "DataExhausted", message)
        return after


@dataclass(frozen=True)
class ComponentAlive:
    """A heartbeat of `component` came in."""

    component: str

    def after(self, state: State, rules: Rules) -> State:
        message = f"{self.component} is alive again"
        return replace(state, restarting=state.restarting - {self.component}, reason="ComponentAlive", message=message)


@dataclass(frozen=True)
class ComponentExited:
    """The process of `component` ended. The verdict is in the state's `exits`."""

    request_id: str
    """Not empty. The same report, sent again, changes nothing."""
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
        if self.exit_code == InvalidArgumentError.exit_code:
            why = "its configuration is wrong, so that it is not started again"
            return self._failed(state, last, "BadConfiguration", why)
        if last.restarts >= rules.max_restarts:
            why = f"it was started again {last.restarts} times already, which is the limit"
            return self._failed(state, last, "ComponentFailed", why)
        return self._restarted(state, last, rules)

    def _recorded(self, state: State, last: ExitRecord, verdict: Verdict) -> State:
        record = replace(last, request_id=self.request_id, verdict=verdict)
        return replace(state, exits={**state.exits, self.component: record})

    def _failed(self, state: State, last: ExitRecord, reason: str, why: str) -> State:
        tail = "\n".join(self.log_tail.strip().splitlines()[-MAX_LOG_LINES:])[-MAX_LOG_CHARACTERS:]
        message = f"{self._ending()}; {why}. Last lines of its log:\n{tail}"
        state = self._recorded(state, last, Verdict(restart=False))
        return state.ending(Phase.FAILED, reason, message)

    def _restarted(self, state: State, last: ExitRecord, rules: Rules) -> State:
        # One that was heard of since its last restart had come back: a long run may lose it now and then.
        in_a_row = last.in_a_row + 1 if self.component in state.restarting else 1
        restarts, delay_seconds = last.restarts + 1, backoff_seconds(in_a_row)
        last = replace(last, restarts=restarts, in_a_row=in_a_row)
        return replace(
            self._recorded(state, last, Verdict(restart=True, delay_seconds=delay_seconds)),
            restarting=state.restarting | {self.component},
            reason="ComponentExited",
            message=f"{self._ending()}; restart {restarts} of {rules.max_restarts} in {delay_seconds:g} s",
        )

    def _ending(self) -> str:
        if self.exit_code >= 0:
            return f"{self.component} ended with exit code {self.exit_code}"
        names = {int(signal): signal.name for signal in Signals}
        return f"{self.component} was ended by {names.get(-self.exit_code, f'signal {-self.exit_code}')}"


@dataclass(frozen=True)
class ErrorReported:
    """A component reported an error."""

    severity: Severity
    module: str
    message: str

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None or rules.stop_severity is None or self.severity < rules.stop_severity:
            return state
        reason = "CriticalError" if self.severity is Severity.CRITICAL else "ErrorReported"
        return state.ending(Phase.FAILED, reason, f"{self.module}: {self.message}")


@dataclass(frozen=True)
class Stalled:
    """Nothing moves; `message` names the blocking edge."""

    message: str

    def after(self, state: State, rules: Rules) -> State:
        if state.phase not in (Phase.STARTING, Phase.RUNNING, Phase.VALIDATING):
            return state
        return replace(state, reason=STALLED, message=self.message)


@dataclass(frozen=True)
class StopRequested:
    """The user asks for the end; `why` is for people."""

    why: str

    def after(self, state: State, rules: Rules) -> State:
        if state.outcome is not None:
            return state
        outcome = Phase.SUCCEEDED if state.is_trained else Phase.FAILED
        return state.ending(outcome, "Stopped", self.why or "the user asked for it")


@dataclass(frozen=True)
class ComponentsStopped:
    """No component runs any more."""

    def after(self, state: State, rules: Rules) -> State:
        _require(state.outcome is not None, state, self)
        return replace(state, has_ended=True)


def backoff_seconds(in_a_row: int) -> float:
    """Seconds to wait before the n-th restart of a component in a row, n from 1."""
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(in_a_row - 1, 16), MAX_BACKOFF_SECONDS)


def _require(condition: bool, state: State, event: Event) -> None:
    if not condition:
        raise IllegalTransitionError(f"{event}: not possible while {state.phase} ({state.reason})")
