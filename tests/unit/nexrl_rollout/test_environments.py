"""Rewards and environments that come with the project."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.datasets import open_dataset
from nexrl.environment import Task
from nexrl.rewards import RewardFailedError, score
from nexrl.spec.data import ReasoningGymDataSpec
from nexrl_rollout.environments.number_guess import NumberGuess
from tests.support.packages import needs_reasoning_gym


@pytest.fixture
def native_score() -> Callable[..., float]:
    """The score of reasoning-gym, which the default installation does not contain."""
    from nexrl_rollout.environments.reasoning_gym import native_score  # imports the package

    return native_score


@needs_reasoning_gym
def test_reasoning_gym_scores_with_the_generators_own_scorer(native_score: Callable[..., float]) -> None:
    data = ReasoningGymDataSpec(type="reasoning_gym", name="chain_sum", size=3)
    for task in open_dataset(data, Path()).tasks:
        assert score(native_score, task, f"so <answer>{task['answer']}</answer>", True).reward == 1.0
        assert score(native_score, task, f" {task['answer']} ", True).reward == 1.0
        assert score(native_score, task, "<answer>no idea</answer>", True).reward < 0.5


@needs_reasoning_gym
def test_scorer_that_raises_is_a_failed_reward_and_not_a_zero(native_score: Callable[..., float]) -> None:
    data = ReasoningGymDataSpec(type="reasoning_gym", name="prime_factorization", size=1)
    (task,) = open_dataset(data, Path()).tasks
    with pytest.raises(RewardFailedError):
        score(native_score, task, "<answer>no number</answer>", True)


async def test_number_guess_hints_until_the_number_is_found() -> None:
    game = NumberGuess()
    opening = await game.reset(Task("t", {"prompt": "guess", "answer": "7"}))
    assert opening.messages == [{"role": "user", "content": "guess"}]
    turns = [await game.step(reply) for reply in ("3", "9", "what", "7")]
    assert [turn.messages[0]["content"] for turn in turns[:3]] == ["higher", "lower", "a number"]
    assert (turns[3].is_over, turns[3].reward) == (True, 0.25)
