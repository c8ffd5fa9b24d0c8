"""Restarts of the controller and of the private Redis on one machine."""

import pytest

from nexrl.local.restart_budget import RestartBudget

KILLED = -9


def pauses(budget: RestartBudget, *exit_codes: int, step: int = 0, now_seconds: float = 0.0) -> list[float | None]:
    """Return the pause after each of these exits."""
    return [budget.pause_seconds(code, step, now_seconds) for code in exit_codes]


def test_restarts_without_a_new_step_end_at_the_limit_and_the_pauses_grow() -> None:
    assert pauses(RestartBudget(3, 60), KILLED, 1, KILLED, KILLED) == [0.2, 0.4, 0.8, None]
    assert pauses(RestartBudget(20, 60), *[KILLED] * 10)[-1] == 30


def test_a_new_step_gives_all_restarts_back() -> None:
    budget = RestartBudget(2, 60)
    for step in (0, 7, 8):
        assert pauses(budget, KILLED, KILLED, step=step) == [0.2, 0.4]
    assert pauses(budget, KILLED, step=8) == [None]


@pytest.mark.parametrize("exit_code", [6, 8])
def test_a_controller_without_redis_uses_up_no_restart_and_yet_does_not_wait_forever(exit_code: int) -> None:
    budget = RestartBudget(1, 60)
    assert pauses(budget, exit_code, exit_code, KILLED, exit_code) == [0.2, 0.4, 0.8, 1.6]
    assert pauses(budget, exit_code, now_seconds=59) == [3.2]
    assert pauses(budget, exit_code, now_seconds=60) == [None]
    assert pauses(budget, exit_code, step=1, now_seconds=60) == [0.2]


@pytest.mark.parametrize("exit_code", [2, 4])
def test_what_is_configured_wrongly_is_not_restarted(exit_code: int) -> None:
    assert pauses(RestartBudget(3, 60), exit_code) == [None]
