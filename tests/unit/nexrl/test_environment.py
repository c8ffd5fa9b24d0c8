"""Environments: valid outcomes, and references to environments."""

from pathlib import Path

import pytest

from nexrl.environment import ChatLoop, Outcome, load_environment
from nexrl.errors import InvalidArgumentError


def test_failure_cannot_carry_a_reward_and_a_success_must() -> None:
    with pytest.raises(InvalidArgumentError, match="ok and truncated require a reward"):
        Outcome("env_error", 0.0)
    with pytest.raises(InvalidArgumentError, match="ok and truncated require a reward"):
        Outcome("ok")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_outcome_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(InvalidArgumentError, match="finite"):
        Outcome("ok", number)
    with pytest.raises(InvalidArgumentError, match="finite"):
        Outcome("ok", 1.0, {"part": number})
    with pytest.raises(InvalidArgumentError, match=r"turn_rewards .* finite"):
        Outcome("ok", 1.0, turn_rewards=[number])


def test_environment_is_loaded_by_reference_from_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "game_of_user.py").write_text(
        "from nexrl.environment import ChatLoop\n"
        "def game():\n    return ChatLoop(object, max_turns=1)\n"
        "class Wrong:\n    pass\n"
        "class Sync:\n    def run(self, task, endpoint):\n        pass\n"
        "class NotCallable:\n    run = 3\n"
        "def exits():\n    raise SystemExit('no game')\n"
    )
    assert isinstance(load_environment("game_of_user:game", tmp_path), ChatLoop)
    assert type(load_environment("game_of_user:Sync", tmp_path)).__name__ == "Sync"
    for name in ("Wrong", "NotCallable"):
        with pytest.raises(InvalidArgumentError, match=rf"{name}, which has no method `\[async\] def run"):
            load_environment(f"game_of_user:{name}", tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"rollout\.environment game_of_user:exits: SystemExit .*: no game"):
        load_environment("game_of_user:exits", tmp_path)
