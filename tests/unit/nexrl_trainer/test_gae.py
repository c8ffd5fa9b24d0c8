"""Advantages of tokens from rewards and values: the formula, and which token a reward belongs to."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.algorithm import Batch, Sample, Trajectory
from nexrl.columns import TOKEN_REWARDS
from nexrl.critic_columns import RETURNS, REWARDS, SAMPLE, VALUES, check_critic_columns
from nexrl.errors import InvalidArgumentError
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.critic import Ppo
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.gae import gae, rewarded, with_advantages

FLOATS = st.floats(-10, 10, allow_nan=False)
SHARES = st.floats(0, 1)


def ppo(**keys: Any) -> Ppo:
    algorithm = AlgorithmSpec.model_validate({"type": "ppo", **keys})
    assert isinstance(algorithm, Ppo)
    return algorithm


def trajectory(mask: list[int], reward: float, token_rewards: list[float] | None = None) -> Trajectory:
    columns = {} if token_rewards is None else {TOKEN_REWARDS: np.array(token_rewards, np.float32)}
    size = len(mask)
    return Trajectory(np.arange(size), np.array(mask, bool), np.zeros(size, np.float32), reward, columns=columns)


def packed(*samples: list[Trajectory], rewards: list[float] | None = None) -> TrainBatch:
    batch = Batch(0, [[Sample(str(number), each)] for number, each in enumerate(samples)])
    given_S = np.array(rewards if rewards is not None else batch.rewards_B)
    return TrainBatch.pack(rewarded(batch, given_S, np.zeros(len(samples), bool), {}).sequences)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=12), SHARES, SHARES)
def test_gae_is_the_discounted_sum_of_temporal_differences(
    steps: list[tuple[float, float]], discount: float, gae_lambda: float
) -> None:
    rewards_T, values_T = np.array(steps).T
    following_T = [*values_T[1:], 0.0]
    deltas_T = [r + discount * later - v for r, later, v in zip(rewards_T, following_T, values_T, strict=True)]
    for t, advantage in enumerate(gae(rewards_T, values_T, discount, gae_lambda)):
        expected = sum((discount * gae_lambda) ** ahead * delta for ahead, delta in enumerate(deltas_T[t:]))
        assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_with_lambda_1_the_advantage_is_the_return_minus_the_value() -> None:
    rewards_T, values_T = np.array([1.0, 0.0, 2.0]), np.array([0.5, 0.25, 4.0])
    np.testing.assert_allclose(gae(rewards_T, values_T, 0.5, 1.0), [1 + 0.5 - 0.5, 1 - 0.25, 2 - 4])


def test_a_reward_of_a_sample_belongs_to_its_last_token() -> None:
    batch = packed([trajectory([0, 1, 1, 0, 1], 3.0)])
    assert batch.columns[REWARDS].tolist() == [0, 0, 0, 0, 3]


def test_a_reward_of_a_tool_result_belongs_to_the_token_that_led_to_it() -> None:
    """Tokens 3 and 4 are the result of a tool, token 0 the prompt, whose reward nobody has earned."""
    rewards = [9.0, 0.0, 1.0, 2.0, 4.0, 0.5, 0.0]
    batch = packed([trajectory([0, 1, 1, 0, 0, 1, 0], sum(rewards) + 1, rewards)])
    changed, _ = with_advantages(batch, np.zeros(7, np.float32), ppo())
    assert changed.columns[RETURNS].tolist() == [0, 7 + 1.5, 1 + 2 + 4 + 1.5, 0, 0, 0.5 + 1, 0]


def test_a_later_trajectory_of_a_sample_counts_for_the_earlier_one_and_no_other_sample() -> None:
    batch = packed([trajectory([0, 1], 0.0), trajectory([0, 1], 2.0)], [trajectory([0, 1], 5.0)])
    assert batch.columns[SAMPLE].tolist() == [0, 0, 1]
    changed, _ = with_advantages(batch, np.zeros(6, np.float32), ppo())
    assert changed.columns[RETURNS].tolist() == [0, 2, 0, 2, 0, 5]


def test_penalties_are_part_of_the_rewards_and_dropped_samples_are_left_out() -> None:
    batch = Batch(0, [[Sample("0", [trajectory([0, 1], 1.0)]), Sample("1", [trajectory([0, 1], 1.0)])]])
    prepared = rewarded(batch, np.array([0.5, 1.0]), np.array([False, True]), {"x": 1.0})
    (sequence,) = prepared.sequences
    assert np.asarray(sequence.columns[REWARDS]).tolist() == [0, 0.5]
    assert prepared.metrics == {"x": 1.0}


def test_advantages_are_whitened_and_the_figures_say_how_good_the_values_were() -> None:
    batch = packed([trajectory([0, 1], 1.0)], [trajectory([0, 1], 3.0)])
    values_N = np.array([0, 1, 0, 2], np.float32)
    changed, figures = with_advantages(batch, values_N, ppo())
    np.testing.assert_allclose(changed.advantages_N, np.array([0, -1, 0, 1]) / np.sqrt(2), atol=1e-3)
    assert changed.columns[VALUES].tolist() == values_N.tolist()
    assert figures is not None
    assert (figures.return_mean, figures.value_mean, figures.explained_variance) == (2.0, 1.5, 0.75)


def test_values_that_foretell_all_returns_explain_everything_and_leave_no_advantage() -> None:
    batch = packed([trajectory([0, 1], 1.0)], [trajectory([0, 1], 3.0)])
    changed, figures = with_advantages(batch, np.array([0, 1, 0, 3], np.float32), ppo())
    assert figures is not None
    assert figures.explained_variance == 1.0
    assert not changed.advantages_N.any()


def test_equal_returns_have_no_variance_to_explain() -> None:
    batch = packed([trajectory([0, 1], 1.0)], [trajectory([0, 1], 1.0)])
    _, figures = with_advantages(batch, np.zeros(4, np.float32), ppo())
    assert figures is not None
    assert figures.explained_variance == 0.0


def test_a_batch_without_the_columns_of_a_critic_is_refused_by_their_names() -> None:
    plain = TrainSequence([1, 2], [False, True], [0.0, -1.0], 0.0)
    with pytest.raises(InvalidArgumentError, match=r"columns\[rewards\]: .* needs the reward of each token"):
        check_critic_columns(TrainBatch.pack([plain]))
    with pytest.raises(InvalidArgumentError, match=r"columns\[rewards\]"):
        check_critic_columns(
            TrainBatch.pack([TrainSequence([1, 2], [False, True], [0, -1], 0, columns={REWARDS: [0, np.nan]})])
        )
    with pytest.raises(InvalidArgumentError, match=r"columns\[sample\]: .* an integer for each sequence"):
        check_critic_columns(
            TrainBatch.pack([TrainSequence([1, 2], [False, True], [0, -1], 0, columns={REWARDS: [0, 1]})])
        )
    check_critic_columns(TrainBatch.pack([]))


@pytest.mark.parametrize("name", [REWARDS, SAMPLE])
def test_a_column_of_a_rollout_with_the_name_of_one_of_ours_is_refused(name: str) -> None:
    own = replace(trajectory([0, 1], 1.0), columns={name: np.zeros(2, np.float32)})
    with pytest.raises(InvalidArgumentError, match=rf"columns\[{name}\] of sample 0: .* another name"):
        packed([own])
