"""Restarts of the controller and of the private Redis on one machine."""

import json
from typing import Any

import pytest

from nexrl.local.restart_budget import RestartBudget
from nexrl.spec.monitor import FailurePolicySpec

KILLED = -9


def budget(max_restarts: int, *rules: dict[str, Any]) -> RestartBudget:
    """Return the budget of Redis without a restart so far."""
    return RestartBudget(
        "redis", FailurePolicySpec.model_validate_json(json.dumps({"maxRestarts": max_restarts, "rules": rules})), 60
    )


def pauses(budget: RestartBudget, *exit_codes: int, step: int = 0, now_seconds: float = 0.0) -> list[float | None]:
    """Return the pause after each of these exits."""
    return [budget.pause_seconds(code, step, now_seconds) for code in exit_codes]


def test_restarts_without_a_new_step_end_at_the_limit_and_the_pauses_grow() -> None:
    assert pauses(budget(3), KILLED, 1, KILLED, KILLED) == [0.2, 0.4, 0.8, None]
    assert pauses(budget(20), *[KILLED] * 10)[-1] == 30


def test_a_new_step_gives_all_restarts_back() -> None:
    redis = budget(2)
    for step in (0, 7, 8):
        assert pauses(redis, KILLED, KILLED, step=step) == [0.2, 0.4]
    assert pauses(redis, KILLED, step=8) == [None]


@pytest.mark.parametrize("exit_code", [6, 8])
def test_a_controller_without_redis_uses_up_no_restart_and_yet_does_not_wait_forever(exit_code: int) -> None:
    redis = budget(1)
    assert pauses(redis, exit_code, exit_code, KILLED, exit_code) == [0.2, 0.4, 0.8, 1.6]
    assert pauses(redis, exit_code, now_seconds=59) == [3.2]
    assert pauses(redis, exit_code, now_seconds=60) == [None]
    assert pauses(redis, exit_code, step=1, now_seconds=60) == [0.2]


@pytest.mark.parametrize("exit_code", [2, 4])
def test_what_is_configured_wrongly_is_not_restarted(exit_code: int) -> None:
    assert pauses(budget(3), exit_code) == [None]


def test_rules_decide_before_the_defaults() -> None:
    assert pauses(budget(0, {"exitCodes": [KILLED, 2], "action": "Ignore"}), KILLED, 2, 1) == [0.2, 0.4, None]
    assert pauses(budget(3, {"exitCodes": [6], "action": "Fail"}), 6) == [None]
    of_another = {"exitCodes": [KILLED], "action": "Fail", "components": ["controller"]}
    assert pauses(budget(1, of_another), KILLED) == [0.2]
