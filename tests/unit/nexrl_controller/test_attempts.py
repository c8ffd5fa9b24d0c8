"""When samples that fail are reported, and when they end the experiment."""

import pytest

from nexrl_controller.attempts import MIN_ATTEMPTS, Count, FailedAttempt, Window, is_reported, moved, reaches, report
from nexrl_controller.events import AttemptsCounted, Started, StopRequested, VersionCommitted
from nexrl_controller.lifecycle import advance
from nexrl_controller.state import MIN_FAILURE_WINDOW, Phase, Rules, State
from tests.support.controller import new_state, rules

SIZE = 100
LAST = FailedAttempt("3.1", "rollout-0", "REWARD_ERROR", "reward of task 7: ValueError (mine.py:12): no answer")


def window(*counts: tuple[int, int]) -> Window:
    """The window after counts of finished and failed attempts."""
    found = None
    for finished, failed in counts:
        found = moved(found, Count(finished, failed), SIZE)
    assert found is not None
    return found


def test_the_window_holds_from_one_to_two_times_its_size() -> None:
    counts = [(number, number // 2) for number in range(1, 1000, 7)]
    for last in range(1, len(counts)):
        found = window(*counts[:last])
        assert found.finished == counts[last - 1][0] - 1 or SIZE <= found.finished <= 2 * SIZE + 7


def test_what_finished_before_the_first_count_is_not_in_the_window() -> None:
    assert window((500, 500)).finished == 0
    assert (window((500, 500), (540, 510)).finished, window((500, 500), (540, 510)).failed_ratio) == (40, 0.25)


def test_a_count_that_went_back_begins_a_new_window() -> None:
    assert window((0, 0), (150, 150), (20, 0)) == window((20, 0))


@pytest.mark.parametrize(
    ("counts", "limit", "is_reached"),
    [
        pytest.param([(0, 0), (99, 99)], 1.0, False, id="fewer than the window's size"),
        pytest.param([(0, 0), (100, 100)], 1.0, True, id="all failed"),
        pytest.param([(0, 0), (1000, 999)], 1.0, False, id="one was scored"),
        pytest.param([(0, 0), (60, 0), (160, 100)], 1.0, False, id="scored ones are still in the window"),
        pytest.param([(0, 0), (100, 0), (200, 100), (300, 200)], 1.0, True, id="failing since"),
        pytest.param([(0, 0), (100, 50)], 0.5, True, id="at the limit"),
        pytest.param([(0, 0), (100, 49)], 0.5, False, id="below the limit"),
    ],
)
def test_the_limit_is_a_share_of_a_whole_window(counts: list[tuple[int, int]], limit: float, is_reached: bool) -> None:
    assert reaches(window(*counts), SIZE, limit) is is_reached


def test_the_report_names_share_sample_worker_exception_and_remedy() -> None:
    assert report(window((0, 0), (50, 26)), LAST) == (
        "52 % of the last 50 attempts at samples failed; the newest, sample 3.1 of rollout-0: "
        "REWARD_ERROR: reward of task 7: ValueError (mine.py:12): no answer; fix the reward function"
    )


def test_few_failures_are_not_reported() -> None:
    assert not is_reported(window((0, 0), (MIN_ATTEMPTS - 1, MIN_ATTEMPTS - 1)))
    assert is_reported(window((0, 0), (MIN_ATTEMPTS, MIN_ATTEMPTS)))
    assert not is_reported(window((0, 0), (1000, 199)))
    assert is_reported(window((0, 0), (1000, 200)))


def failing(*counts: int, under: Rules | None = None, state: State | None = None) -> State:
    """The state of a running experiment after counts of attempts of which each failed."""
    state = state or advance(advance(new_state(), Started(is_suspended=False), rules()), VersionCommitted(0), rules())
    for count in counts:
        state = advance(state, AttemptsCounted(Count(count, count), LAST), under or rules())
    return state


def test_an_experiment_of_which_every_attempt_fails_ends_and_says_why() -> None:
    size = rules().failure_window
    assert failing(0, size - 1).phase is Phase.RUNNING
    ended = failing(0, size - 1, size)
    assert (ended.phase, ended.outcome, ended.reason) == (Phase.STOPPING, Phase.FAILED, "SamplesFailing")
    assert f"100 % of the last {size} attempts" in ended.message
    assert "ValueError (mine.py:12): no answer; fix the reward function" in ended.message
    assert ended.message.endswith("; the limit is rollout.maxFailureRatio, 1")


def test_failing_samples_are_told_before_they_end_the_experiment_and_change_nothing_else() -> None:
    state = failing(0, 20)
    assert state.failing_samples.startswith("100 % of the last 20")
    assert (state.phase, state.reason) == (Phase.RUNNING, "Training")


def test_attempts_in_flight_that_fail_together_never_fill_the_window() -> None:
    many = rules(trajectoryPool={"batchSize": 8}, rollout={"maxNewTokens": 8, "replicas": 3, "workers": 100})
    assert many.failure_window == 600


def test_the_window_is_four_batches_and_the_limit_is_that_of_the_experiment() -> None:
    asked = rules(trajectoryPool={"batchSize": 64}, rollout={"maxNewTokens": 8, "maxFailureRatio": 0.25})
    assert (asked.failure_window, asked.max_failure_ratio) == (256, 0.25)
    assert rules(trajectoryPool={"batchSize": 8}).failure_window == MIN_FAILURE_WINDOW


def test_a_limit_below_what_is_reported_ends_the_experiment_with_the_same_words() -> None:
    under = rules(rollout={"maxNewTokens": 8, "maxFailureRatio": 0.05})
    state = failing(0)
    state = advance(state, AttemptsCounted(Count(1000, 60), LAST), under)
    assert state.outcome is Phase.FAILED
    assert state.message == f"{report(window((0, 0), (1000, 60)), LAST)}; the limit is rollout.maxFailureRatio, 0.05"


def test_an_experiment_that_continues_after_errors_also_continues_after_failing_samples() -> None:
    under = rules(monitor={"errors": {"policy": "continue"}})
    state = failing(0, 10_000, under=under)
    assert (state.phase, state.outcome) == (Phase.RUNNING, None)
    assert state.failing_samples


@pytest.mark.parametrize("pauses", [(False,), (True, False)], ids=["restarted", "suspended"])
def test_attempts_before_the_start_of_the_controller_do_not_count(pauses: tuple[bool, ...]) -> None:
    size = rules().failure_window
    state = failing(0, size - 1)
    for is_suspended in pauses:
        state = advance(state, Started(is_suspended), rules())
    assert state.failing_samples == ""
    assert failing(size, 2 * size - 1, state=state).outcome is None
    assert failing(size, 2 * size, state=state).outcome is Phase.FAILED


def test_an_outcome_is_not_changed_by_failing_samples() -> None:
    stopped = advance(failing(0), StopRequested("enough"), rules())
    assert failing(0, 10_000, state=stopped) == stopped
