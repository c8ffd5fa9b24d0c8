"""Environments: outcomes that mean something, and references to them."""

from pathlib import Path

import pytest

from nexrl.environment import ChatLoop, Outcome, load_environment
from nexrl.errors import InvalidArgumentError


def test_failure_cannot_carry_a_reward_and_a_success_must() -> None:
    with pytest.raises(InvalidArgumentError, match="only ok and truncated"):
        Outcome("env_error", 0.0)
    with pytest.raises(InvalidArgumentError, match="only ok and truncated"):
        Outcome("ok")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_outcome_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(InvalidArgumentError, match="finite"):
        Outcome("ok", number)
    with pytest.raises(InvalidArgumentError, match="finite"):
        Outcome("ok", 1.0, {"part": number})


def test_environment_is_loaded_by_reference_from_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "game_of_user.py").write_text(
        "from nexrl.environment import ChatLoop\n"
        "def game():\n    return ChatLoop(object, max_turns=1)\n"
        "class Wrong:\n    pass\n"
    )
    assert isinstance(load_environment("game_of_user:game", tmp_path), ChatLoop)
    with pytest.raises(InvalidArgumentError, match="run"):
        load_environment("game_of_user:Wrong", tmp_path)
