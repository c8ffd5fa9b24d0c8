"""Advantages against plain loops, and their invariants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.spec.algorithm import BATCH_BASELINES, GROUP_BASELINES, AlgorithmSpec
from nexrl_trainer.advantages import (
    ADVANTAGES,
    batch_scaled_group_advantages,
    compared_groups,
    group_mean_advantages,
    group_standardized_advantages,
    leave_one_out_advantages,
    max_likelihood_advantages,
    zero_variance_samples,
)

# Group 7: rewards 0, 1, 1; group 3: 2, 4; interleaved, as completions arrive.
REWARDS_B = np.array([0.0, 2.0, 1.0, 4.0, 1.0])
GROUPS_B = np.array([7, 3, 7, 3, 7])


def test_the_names_are_those_of_the_experiment_file() -> None:
    assert set(ADVANTAGES) == {*GROUP_BASELINES, *BATCH_BASELINES}


samples = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=30)


def test_group_mean_subtracts_the_mean_of_the_own_group() -> None:
    expected_B = np.array([-2 / 3, -1, 1 / 3, 1, 1 / 3])
    np.testing.assert_allclose(group_mean_advantages(REWARDS_B, GROUPS_B), expected_B, rtol=1e-6)


def test_standardized_divides_by_the_sample_deviation_plus_a_floor() -> None:
    std_7, std_3 = np.std([0, 1, 1], ddof=1) + 1e-4, np.std([2, 4], ddof=1) + 1e-4
    expected_B = np.array([-2 / 3 / std_7, -1 / std_3, 1 / 3 / std_7, 1 / std_3, 1 / 3 / std_7])
    np.testing.assert_allclose(group_standardized_advantages(REWARDS_B, GROUPS_B), expected_B, rtol=1e-6)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    expected_B = np.array([0 - 1, 2 - 4, 1 - 0.5, 4 - 2, 1 - 0.5])
    np.testing.assert_allclose(leave_one_out_advantages(REWARDS_B, GROUPS_B), expected_B, rtol=1e-6)


def test_max_likelihood_divides_by_the_mean_of_the_group() -> None:
    rewards_B = np.array([1.0, 0.0, 0.0, 0.0, -1.0, 0.0])
    groups_B = np.array([0, 0, 0, 0, 1, 1])
    expected_B = [3.0, -1.0, -1.0, -1.0, 0.0, 0.0]  # the second group's mean is negative
    np.testing.assert_allclose(max_likelihood_advantages(rewards_B, groups_B), expected_B)


def test_differences_from_the_group_are_divided_by_their_deviation_in_the_batch() -> None:
    differences_B = np.array([-2 / 3, -1, 1 / 3, 1, 1 / 3])
    expected_B = differences_B / (np.std(differences_B, ddof=1) + 1e-4)
    np.testing.assert_allclose(batch_scaled_group_advantages(REWARDS_B, GROUPS_B), expected_B, rtol=1e-6)


def test_a_batch_baseline_compares_all_samples_as_one_group() -> None:
    groups_B = compared_groups(AlgorithmSpec.model_validate({"advantage": "batch_mean_std"}), GROUPS_B)
    expected_B = (REWARDS_B - REWARDS_B.mean()) / (np.std(REWARDS_B, ddof=1) + 1e-4)
    np.testing.assert_allclose(ADVANTAGES["batch_mean_std"](REWARDS_B, groups_B), expected_B, rtol=1e-6)
    assert compared_groups(AlgorithmSpec.model_validate({"advantage": "rloo"}), GROUPS_B) is GROUPS_B


@pytest.mark.parametrize("name", ADVANTAGES)
@given(samples=samples)
def test_advantages_of_a_group_add_up_to_zero(name: str, samples: list[tuple[float, int]]) -> None:
    rewards_B, groups_B = (np.array(column) for column in zip(*samples, strict=True))
    advantages_B = ADVANTAGES[name](rewards_B, groups_B)
    for group in set(groups_B):
        assert abs(advantages_B[groups_B == group].sum()) < 1e-3


@pytest.mark.parametrize("name", ADVANTAGES)
@given(reward=st.floats(-10, 10), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(name: str, reward: float, size: int) -> None:
    rewards_B, groups_B = np.full(size, reward), np.zeros(size, int)
    assert not ADVANTAGES[name](rewards_B, groups_B).any()
    assert zero_variance_samples(rewards_B, groups_B).all()


def test_zero_variance_is_judged_by_group_not_by_advantage() -> None:
    # The middle reward of the first group has advantage 0, and its group still says which sample was better.
    rewards_B, groups_B = np.array([0.0, 0.5, 1.0, 0.3, 0.3]), np.array([0, 0, 0, 1, 1])
    assert zero_variance_samples(rewards_B, groups_B).tolist() == [False, False, False, True, True]
