"""Each way through the life of an experiment."""

from dataclasses import replace

import pytest

from nexrl_controller.error_log import Severity
from nexrl_controller.events import (
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
from nexrl_controller.state import IllegalTransitionError, Phase, Rules, State, Verdict
from tests.support.controller import new_state, rules

START = Started(is_suspended=False)
RUNNING = (START, VersionCommitted(0))
TRAINED = MetricsPosted(4, {"training_complete": 1.0})


def after(*events: Event, under: Rules | None = None, state: State | None = None) -> State:
    state = state or new_state()
    for event in events:
        state = advance(state, event, under or rules())
    return state


def exited(
    component: str = "trainer", exit_code: int = 1, request_id: str = "1", log_tail: str = ""
) -> ComponentExited:
    return ComponentExited(request_id, component, exit_code, log_tail)


@pytest.mark.guide("D2", "D4", "D10")
def test_an_experiment_passes_through_its_phases_to_success() -> None:
    events: list[Event] = [
        START,
        VersionCommitted(0),
        ValidationStarted(0),
        ValidationEnded(0),
        MetricsPosted(4, {"reward_mean": 1.0}),
        VersionCommitted(4),
        TRAINED,
        ValidationStarted(4),
        ValidationEnded(4),
        ComponentsStopped(),
    ]
    state, phases = new_state(), []
    for event in events:
        state = after(event, state=state)
        phases.append(state.phase)
    assert [str(phase) for phase in phases] == [
        "Starting",
        "Running",
        "Validating",
        "Running",
        "Running",
        "Running",
        "Running",
        "Validating",
        "Stopping",
        "Succeeded",
    ]
    assert (state.reason, state.message) == ("Completed", "all 4 steps were made")


@pytest.mark.guide("D4")
def test_without_validation_the_last_checkpoint_is_the_end() -> None:
    state = after(*RUNNING, MetricsPosted(4, {}), under=rules(validation=None))
    assert state.phase is Phase.RUNNING
    assert after(TRAINED, under=rules(validation=None), state=state).outcome is Phase.SUCCEEDED


def test_the_last_validation_may_end_before_the_last_checkpoint() -> None:
    validated = after(*RUNNING, VersionCommitted(4), ValidationStarted(4), ValidationEnded(4))
    assert validated.phase is Phase.RUNNING
    assert after(TRAINED, state=validated).outcome is Phase.SUCCEEDED


def test_data_that_ends_before_the_last_step_ends_the_run_well() -> None:
    state = after(*RUNNING, MetricsPosted(3, {"training_complete": 1.0}))
    assert (state.outcome, state.reason) == (Phase.SUCCEEDED, "DataExhausted")


def test_the_completion_signal_is_not_a_metric() -> None:
    assert after(*RUNNING, TRAINED).metrics == {}


def test_a_replayed_step_does_not_turn_progress_back() -> None:
    assert after(*RUNNING, MetricsPosted(3, {"loss": 1.0}), MetricsPosted(2, {"loss": 2.0})).step == 3


@pytest.mark.guide("A6")
def test_a_component_that_ends_is_started_again_and_the_phase_comes_back() -> None:
    validating = after(*RUNNING, ValidationStarted(0))
    restarting = after(exited("rollout-1", -9), state=validating)
    assert restarting.phase is Phase.RESTARTING
    assert restarting.message == (
        "rollout-1 was ended by SIGKILL; unless somebody killed it, it used too much memory or disk; "
        "it restarts in 0.5 s; "
        "restart 1 of 3 without a new checkpoint"
    )
    back = after(ComponentAlive("rollout-1"), state=restarting)
    assert (back.phase, back.reason) == (Phase.VALIDATING, "ComponentAlive")


def test_a_component_that_ended_by_itself_says_why_while_it_restarts() -> None:
    restarting = after(exited("rollout-1", 4, log_tail="loaded\nno such replica"), state=after(*RUNNING))
    assert restarting.message.startswith("rollout-1 ended with exit code 4: no such replica; it restarts in 0.5 s")


def test_delays_between_restarts_double_up_to_a_limit() -> None:
    state, delays = after(*RUNNING), []
    for number in range(9):
        state = after(exited(request_id=str(number)), state=state, under=rules(failurePolicy={"maxRestarts": 9}))
        delays.append(state.exits["trainer"].verdict.delay_seconds)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_delays_begin_anew_with_a_training_step_and_not_with_a_heartbeat() -> None:
    alive = ComponentAlive("trainer")
    state = after(*RUNNING, exited(request_id="1"), alive, exited(request_id="2"), alive)
    assert state.exits["trainer"].verdict.delay_seconds == 1
    state = after(MetricsPosted(1, {}), exited(request_id="3"), state=state)
    assert state.exits["trainer"].verdict.delay_seconds == 0.5
    assert state.exits["trainer"].counted == 3


def test_restarts_are_counted_for_each_component() -> None:
    once = rules(failurePolicy={"maxRestarts": 1})
    state = after(*RUNNING, exited("trainer"), exited("rollout-0"), under=once)
    assert state.restarts == 2
    assert after(exited("trainer", request_id="2"), under=once, state=state).phase is Phase.STOPPING


def checkpointed(steps: int) -> MetricsPosted:
    return MetricsPosted(steps, {"checkpointed_steps": float(steps)})


def test_a_new_checkpoint_gives_all_restarts_back() -> None:
    once, state = rules(trainer={"steps": 100}, failurePolicy={"maxRestarts": 1}), after(*RUNNING)
    for steps in range(1, 20):
        state = after(checkpointed(steps), exited(request_id=str(steps)), under=once, state=state)
    assert state.phase is Phase.RESTARTING
    assert state.restarts == 19


def test_restarts_without_a_new_checkpoint_end_the_experiment_however_many_steps_are_repeated() -> None:
    once = rules(trainer={"steps": 100}, failurePolicy={"maxRestarts": 1})
    state = after(*RUNNING, checkpointed(4), exited(request_id="1"), under=once)
    state = after(MetricsPosted(9, {"checkpointed_steps": 4.0}), exited(request_id="2"), under=once, state=state)
    assert (state.outcome, state.reason) == (Phase.FAILED, "ComponentFailed")
    assert "it was restarted 1 times without a new checkpoint" in state.message


@pytest.mark.parametrize("exit_code", [6, 8])
def test_a_redis_that_is_away_or_forgets_uses_up_no_restart(exit_code: int) -> None:
    never, state = rules(failurePolicy={"maxRestarts": 0}), after(*RUNNING)
    for number in range(20):
        state = after(exited(exit_code=exit_code, request_id=str(number)), under=never, state=state)
    assert state.phase is Phase.RESTARTING
    assert state.exits["trainer"].verdict == Verdict(restart=True, delay_seconds=30)
    assert "a restart after this exit code is not counted" in state.message


def test_too_many_restarts_fail_with_component_exit_code_and_log() -> None:
    log_tail = "\n".join(f"line {number}" for number in range(100))
    state = after(*RUNNING, exited(exit_code=1, log_tail=log_tail), under=rules(failurePolicy={"maxRestarts": 0}))
    assert (state.outcome, state.reason) == (Phase.FAILED, "ComponentFailed")
    assert state.message.startswith("trainer ended with exit code 1: line 99; it was restarted 0 times")
    assert state.message.endswith("line 98\nline 99")
    assert "line 79" not in state.message
    assert state.exits["trainer"].verdict == Verdict(restart=False)


@pytest.mark.guide("S9")
def test_a_wrong_configuration_is_never_tried_again() -> None:
    state = after(START, exited(exit_code=2, log_tail="trainer: model.path: no such folder"))
    assert (state.outcome, state.reason) == (Phase.FAILED, "BadConfiguration")
    assert "no such folder" in state.message


def test_the_first_rule_for_exit_code_and_component_decides_what_an_exit_leads_to() -> None:
    policy = {
        "maxRestarts": 0,
        "rules": [
            {"exitCodes": [10, -9], "action": "Ignore", "components": ["rollout", "trajectory-pool"]},
            {"exitCodes": [-9, 6], "action": "Fail"},
            {"exitCodes": [2], "action": "Count"},
        ],
    }
    phases = {
        (component, exit_code): after(*RUNNING, exited(component, exit_code), under=rules(failurePolicy=policy)).reason
        for component in ("rollout-1", "x-trajectory-pool-5d9c7-x2k4f", "trainer")
        for exit_code in (-9, 10, 6, 2, 8)
    }
    is_restarted = {key for key, reason in phases.items() if reason == "ComponentExited"}
    ignored = {(name, code) for name in ("rollout-1", "x-trajectory-pool-5d9c7-x2k4f") for code in (-9, 10)}
    assert is_restarted == ignored | {(name, 8) for name in ("rollout-1", "x-trajectory-pool-5d9c7-x2k4f", "trainer")}
    failed = after(*RUNNING, exited("trainer", 6), under=rules(failurePolicy={**policy, "maxRestarts": 3}))
    assert failed.message.startswith("trainer ended with exit code 6; failurePolicy.rules says Fail for this exit code")
    counted = after(*RUNNING, exited("trainer", 2), under=rules(failurePolicy={**policy, "maxRestarts": 1}))
    assert counted.message.endswith("restart 1 of 1 without a new checkpoint")


def test_a_repeated_report_of_an_exit_changes_nothing() -> None:
    state = after(*RUNNING, exited())
    assert after(exited(), state=state) == state


def test_a_trainer_that_leaves_after_its_last_checkpoint_is_let_go() -> None:
    state = after(*RUNNING, TRAINED, exited(exit_code=0))
    assert state.phase is Phase.RUNNING
    assert not state.exits["trainer"].verdict.restart


def test_an_exit_while_stopping_is_expected() -> None:
    state = after(*RUNNING, StopRequested("enough"), exited(exit_code=-15))
    assert (state.phase, state.restarts) == (Phase.STOPPING, 0)


@pytest.mark.guide("D6", "Q46", "S3")
@pytest.mark.parametrize(
    ("policy", "stopped_by"),
    [
        ("stop_on_error", {Severity.ERROR, Severity.CRITICAL}),
        ("stop_on_critical", {Severity.CRITICAL}),
        ("continue", set()),
    ],
)
def test_the_three_error_policies_differ(policy: str, stopped_by: set[Severity]) -> None:
    under = rules(monitor={"errors": {"policy": policy}})
    reports = {severity: ErrorReported(severity, "trainer", "loss is NaN") for severity in Severity}
    ended = {severity for severity in Severity if after(*RUNNING, reports[severity], under=under).outcome is not None}
    assert ended == stopped_by


@pytest.mark.guide("Q44")
def test_errors_stop_nothing_when_their_monitor_is_off() -> None:
    under = rules(monitor={"errors": {"enabled": False, "policy": "stop_on_error"}})
    error = ErrorReported(Severity.CRITICAL, "trainer", "loss is NaN")
    assert after(*RUNNING, error, under=under).phase is Phase.RUNNING


def test_an_error_that_ends_the_experiment_is_its_message() -> None:
    state = after(*RUNNING, ErrorReported(Severity.CRITICAL, "trainer", "loss is NaN"), ComponentsStopped())
    assert (state.phase, state.reason, state.message) == (Phase.FAILED, "CriticalError", "trainer: loss is NaN")


def test_a_stop_before_the_end_is_a_failure_that_says_so() -> None:
    state = after(*RUNNING, StopRequested(""), ComponentsStopped())
    assert (state.phase, state.reason, state.message) == (Phase.FAILED, "Stopped", "the user stopped it")


def test_a_stop_after_the_last_checkpoint_is_a_success() -> None:
    assert after(*RUNNING, TRAINED, StopRequested("")).outcome is Phase.SUCCEEDED


def test_a_stop_that_comes_too_late_changes_nothing() -> None:
    state = after(*RUNNING, StopRequested("first"))
    assert after(StopRequested("second"), state=state) == state


def test_a_stall_is_named_until_training_goes_on() -> None:
    stalled = after(*RUNNING, Stalled("blocked at trainer -> weight-sync"))
    assert (stalled.phase, stalled.reason) == (Phase.RUNNING, "Stalled")
    assert after(MetricsPosted(1, {}), state=stalled).reason == "Training"


def test_a_suspended_experiment_starts_afresh_when_resumed() -> None:
    suspended = after(*RUNNING, ValidationStarted(0), exited(), Started(is_suspended=True))
    assert suspended.phase is Phase.SUSPENDED
    resumed = after(START, state=suspended)
    assert (resumed.phase, resumed.policy_version) == (Phase.STARTING, 0)


@pytest.mark.parametrize("has_failed", [True, False])
def test_an_experiment_that_is_resumed_has_all_its_restarts_and_begins_anew_if_it_had_failed(has_failed: bool) -> None:
    broken = after(*RUNNING, MetricsPosted(2, {}), exited(), exited(request_id="e2"))
    broken = broken.ending(Phase.FAILED, "ComponentFailed", "") if has_failed else broken
    resumed = broken.resumed(replace(new_state(), generation=3))
    [record] = resumed.exits.values()
    assert (record.restarts, record.counted, resumed.generation) == (2, 0, 3)
    assert resumed.phase is (Phase.PENDING if has_failed else Phase.RESTARTING)
    assert resumed.step == (0 if has_failed else 2)


def test_a_restarted_controller_changes_nothing() -> None:
    state = after(*RUNNING, MetricsPosted(2, {"loss": 1.0}), ValidationStarted(0))
    assert after(START, state=state) == state


@pytest.mark.parametrize(
    ("events", "refused"),
    [
        ((), VersionCommitted(0)),
        ((START,), ValidationStarted(0)),
        (RUNNING, ValidationStarted(1)),
        (RUNNING, ValidationEnded(0)),
        ((*RUNNING, VersionCommitted(1), ValidationStarted(1)), ValidationStarted(0)),
        (RUNNING, ComponentsStopped()),
        ((Started(is_suspended=True),), VersionCommitted(0)),
        ((*RUNNING, StopRequested("")), ValidationStarted(0)),
    ],
)
def test_what_makes_no_sense_is_refused(events: tuple[Event, ...], refused: Event) -> None:
    with pytest.raises(IllegalTransitionError, match=type(refused).__name__):
        after(refused, state=after(*events))


def test_metrics_are_kept_within_a_limit() -> None:
    state = after(*RUNNING)
    for step in range(3):
        state = after(MetricsPosted(step, {f"{step}/{number}": 0.0 for number in range(500)}), state=state)
    assert len(state.metrics) == 1000
    assert "2/499" in state.metrics
    assert "0/0" not in state.metrics


def test_the_phase_is_a_function_of_the_facts_alone() -> None:
    state = after(*RUNNING)
    assert replace(state, is_suspended=True).phase is Phase.SUSPENDED
