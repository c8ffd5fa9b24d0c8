"""What holds for every order of events, legal or not."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nexrl_controller.attempts import Count, FailedAttempt
from nexrl_controller.error_log import Severity
from nexrl_controller.events import (
    AttemptsCounted,
    ComponentAlive,
    ComponentExited,
    ComponentsStopped,
    ErrorReported,
    Event,
    MetricsPosted,
    Stalled,
    Started,
    StopRequested,
    ValidationEnded,
    ValidationStarted,
    VersionCommitted,
)
from nexrl_controller.lifecycle import advance
from nexrl_controller.state import LEGAL, TERMINAL, IllegalTransitionError, Phase
from tests.support.controller import new_state, rules

STEPS = st.integers(0, 5)
COMPONENTS = st.sampled_from(["trainer", "rollout-0", "rollout-1"])
RULES = rules(failurePolicy={"maxRestarts": 2})


class Lifecycle(RuleBasedStateMachine):
    """Sends events in any order, and keeps what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.state = new_state()
        self.requests = 0

    def send(self, event: Event) -> None:
        before = self.state
        try:
            self.state = advance(before, event, RULES)
        except IllegalTransitionError:
            return
        after = self.state
        assert after.phase is before.phase or after.phase in LEGAL[before.phase]
        assert after.step >= before.step
        assert after.restarts >= before.restarts
        assert before.outcome in (None, after.outcome), "an outcome is final"
        if before.outcome is not None:
            assert (after.reason, after.message) == (before.reason, before.message)
        if before.phase in TERMINAL:
            assert after.phase is before.phase

    @rule(is_suspended=st.booleans())
    def start(self, is_suspended: bool) -> None:
        self.send(Started(is_suspended))

    @rule(version=STEPS)
    def commit(self, version: int) -> None:
        self.send(VersionCommitted(version))

    @rule(version=STEPS)
    def start_validation(self, version: int) -> None:
        self.send(ValidationStarted(version))

    @rule(version=STEPS)
    def end_validation(self, version: int) -> None:
        self.send(ValidationEnded(version))

    @rule(step=STEPS, is_complete=st.booleans())
    def post(self, step: int, is_complete: bool) -> None:
        self.send(MetricsPosted(step, {"training_complete": 1.0} if is_complete else {"loss": 0.5}))

    @rule(component=COMPONENTS, exit_code=st.sampled_from([0, 1, 2, -9]), is_repeated=st.booleans())
    def exit(self, component: str, exit_code: int, is_repeated: bool) -> None:
        self.requests += not is_repeated
        self.send(ComponentExited(f"request-{self.requests}", component, exit_code, "log"))
        assert component in self.state.exits

    @rule(component=COMPONENTS)
    def hear(self, component: str) -> None:
        self.send(ComponentAlive(component))

    @rule(severity=st.sampled_from(Severity))
    def report(self, severity: Severity) -> None:
        self.send(ErrorReported(severity, "trainer", "an error"))

    @rule()
    def stall(self) -> None:
        self.send(Stalled("blocked"))

    @rule(finished=st.integers(0, 1000), share=st.sampled_from([0.0, 0.5, 1.0]))
    def count_attempts(self, finished: int, share: float) -> None:
        last = FailedAttempt("0.0", "rollout-0", "TIMEOUT", "late")
        self.send(AttemptsCounted(Count(finished, int(share * finished)), last))

    @rule()
    def stop(self) -> None:
        self.send(StopRequested("enough"))

    @rule()
    def end(self) -> None:
        self.send(ComponentsStopped())

    @invariant()
    def restarts_stay_within_the_limit(self) -> None:
        assert all(record.counted <= RULES.failure_policy.max_restarts for record in self.state.exits.values())

    @invariant()
    def success_means_all_that_it_says(self) -> None:
        if self.state.phase is Phase.SUCCEEDED:
            assert self.state.is_trained
            assert self.state.reason in ("Stopped", "DataExhausted") or (
                self.state.step >= RULES.total_steps and self.state.validated_version >= RULES.total_steps
            )

    @invariant()
    def a_finished_experiment_never_keeps_running(self) -> None:
        is_done = self.state.is_trained and self.state.validated_version >= RULES.total_steps <= self.state.step
        assert not is_done or self.state.outcome is not None


TestLifecycle = Lifecycle.TestCase
