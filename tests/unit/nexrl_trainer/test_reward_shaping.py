"""Penalties on rewards: for length, and for distance from the initial model."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nexrl.algorithm import Batch, Sample, Trajectory
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.overlong_penalty import OverlongPenaltySpec
from nexrl.train_batch import TrainSequence
from nexrl_trainer.reward_shaping import kl_sums, overlong_penalties, shaped_rewards


def trajectory(tokens: int, logprob: float = -1.0) -> Trajectory:
    """One token of the prompt, and `tokens` generated ones."""
    mask = np.array([False] + [True] * tokens)
    return Trajectory(np.zeros(tokens + 1, np.int64), mask, np.where(mask, logprob, 0).astype(np.float32), reward=1.0)


def batch(*samples: Sequence[Trajectory]) -> Batch:
    return Batch(0, [[Sample(str(number), each) for number, each in enumerate(samples)]])


def half_as_likely(sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
    """The initial model: each token has log-probability -1.5, and 0 outside the mask."""
    return [np.where(each.loss_mask, -1.5, 0).astype(np.float32) for each in sequences]


def refused(sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
    raise AssertionError("the reference model is not needed")


def test_the_penalty_grows_from_the_first_limit_to_the_second() -> None:
    limits = OverlongPenaltySpec(after_tokens=4, full_tokens=8, penalty=2.0)
    lengths = batch(*([trajectory(tokens)] for tokens in (3, 4, 6, 8, 20)))
    assert overlong_penalties(lengths, limits).tolist() == [0.0, 0.0, 1.0, 2.0, 2.0]


def test_all_trajectories_of_a_sample_count() -> None:
    limits = OverlongPenaltySpec(after_tokens=4, full_tokens=8)
    assert overlong_penalties(batch([trajectory(3), trajectory(3)]), limits).tolist() == [0.5]


def test_the_kl_penalty_is_the_sum_of_log_ratios_over_generated_tokens() -> None:
    sums = kl_sums(batch([trajectory(2)], [trajectory(1), trajectory(4)], [trajectory(3, -2.0)]), half_as_likely)
    np.testing.assert_allclose(sums, [1.0, 2.5, -1.5])


def test_rewards_lose_both_penalties() -> None:
    penalty = OverlongPenaltySpec(after_tokens=0, full_tokens=10)
    algorithm = AlgorithmSpec(overlong_penalty=penalty, kl_reward_coefficient=0.1)
    rewards = shaped_rewards(batch([trajectory(2)], [trajectory(10)]), algorithm, half_as_likely)
    np.testing.assert_allclose(rewards, [1 - 0.2 - 0.1, 1 - 1 - 0.5])


def test_without_penalties_rewards_are_as_they_are_and_the_reference_model_is_not_built() -> None:
    assert shaped_rewards(batch([trajectory(2)]), AlgorithmSpec(), refused).tolist() == [1.0]
