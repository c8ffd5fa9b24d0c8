"""Rewards: what counts as right, and that a reward that fails is an error and never a zero."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError
from nexrl.rewards import Reward, RewardFailedError, exact_match, last_number, load_reward, math_answer, score

SORT_DIGITS = Path(__file__).parents[3] / "examples" / "sort-digits"


def task(answer: object) -> dict[str, object]:
    return {"id": "train-0", "prompt": "?", "answer": answer, "metadata": {}}


@pytest.mark.parametrize(
    ("text", "is_finished", "reward"), [("1234", True, 1), (" 1234\n", True, 1), ("1234", False, 0), ("12345", True, 0)]
)
def test_exact_match_needs_the_answer_and_its_end(text: str, is_finished: bool, reward: float) -> None:
    assert exact_match(task("1234"), text, is_finished) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("4 - 17 = -13", "-13", 1),
        ("-13", "-13", 1),
        ("13", "-13", 0),
        ("20-13", "13", 1),
        ("The answer is 7.", "7", 1),
        ("7, not 8", "7", 0),
        ("1,234", "1234", 1),
        ("7.0", "7", 1),
        ("none", "7", 0),
        ("", "7", 0),
    ],
)
def test_last_number_compares_the_last_number(text: str, answer: str, reward: float) -> None:
    assert last_number(task(answer), text, False) == reward


@given(answer=st.integers(-(10**6), 10**6), before=st.text(alphabet="abc =+", max_size=10))
def test_last_number_finds_any_integer_after_any_words(answer: int, before: str) -> None:
    assert last_number(task(str(answer)), f"{before}= {answer}", True) == 1
    assert last_number(task(str(answer)), f"{before}= {answer + 1}", True) == 0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"so \boxed{42}.", "42", 1),
        (r"\boxed{41} then \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac{1}{2}} from 7", r"\boxed{ \frac{1}{2} }", 1),
        ("work\n#### 1,072", "1072", 1),
        ("it is 72.0", "#### 72", 1),
        (r"\boxed{41}, or 42", "42", 0),
        (r"\boxed{42", "42", 1),
        ("no idea", "x", 0),
    ],
)
def test_math_answer_takes_the_box_then_the_mark_then_the_last_number(text: str, answer: str, reward: float) -> None:
    assert math_answer(task(answer), text, True) == reward


def test_a_reward_and_its_components_are_told_apart() -> None:
    def reward(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
        return {"reward": 0.5, "exact": 0}

    scored = score(reward, task("x"), "y", True)
    assert (scored.reward, scored.components) == (0.5, {"exact": 0.0})
    assert score(exact_match, task("x"), "x", True).reward == 1


@pytest.mark.parametrize("returned", [None, "high", "0.5", math.nan, math.inf, {"exact": 1.0}, {"reward": None}])
def test_what_is_no_number_is_an_error(returned: object) -> None:
    def reward(task: Mapping[str, object], text: str, is_finished: bool) -> float:
        return returned  # type: ignore[return-value]

    with pytest.raises(RewardFailedError, match="reward of task train-0"):
        score(reward, task("x"), "y", True)


def test_what_is_no_reward_is_shown_with_the_function_that_returned_it() -> None:
    def mine(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
        return {"reward": 1.0, "length": cast(float, "7")}

    shown = rf"mine \({__file__}:\d+\) returned {{'reward': 1.0, 'length': '7'}}; use finite numbers"
    with pytest.raises(RewardFailedError, match=shown):
        score(mine, task("x"), "y", True)


def test_a_reward_that_raises_is_an_error_with_its_cause() -> None:
    with pytest.raises(RewardFailedError, match="InvalidOperation") as caught:
        score(last_number, task("seven"), "7", True)
    assert caught.value.__cause__ is not None


def test_a_reward_that_exits_is_an_error() -> None:
    def reward(task: Mapping[str, object], text: str, is_finished: bool) -> float:
        sys.exit("no grader")

    with pytest.raises(RewardFailedError, match=r"SystemExit.*: no grader"):
        score(reward, task("7"), "7", True)


def test_rewards_are_loaded_by_reference() -> None:
    assert load_reward("nexrl.rewards:last_number", Path()) is last_number
    with pytest.raises(InvalidArgumentError, match="has no nothing"):
        load_reward("nexrl.rewards:nothing", Path())
    with pytest.raises(InvalidArgumentError, match="is not a function but type"):
        load_reward("nexrl.rewards:Score", Path())
    with pytest.raises(InvalidArgumentError, match="is not a function but str"):
        load_reward("nexrl.rewards:__name__", Path())


@pytest.fixture(name="sort_reward")
def _sort_reward() -> Reward:
    return load_reward("sort_digits:reward", SORT_DIGITS)


@pytest.mark.parametrize(
    ("text", "is_finished", "reward", "exact"),
    [
        ("1234", True, 1.0, 1.0),
        ("1234", False, 0.5, 0.0),
        ("12345", True, 0.8, 0.0),
        ("12", True, 0.5, 0.0),
        ("4321", True, 0.0, 0.0),
        ("", True, 0.0, 0.0),
    ],
)
def test_sorting_is_rewarded_by_characters_in_place(
    sort_reward: Reward, text: str, is_finished: bool, reward: float, exact: float
) -> None:
    scored = score(sort_reward, task("1234"), text, is_finished)
    assert scored.reward == pytest.approx(reward)
    assert scored.components == {"exact": exact}
