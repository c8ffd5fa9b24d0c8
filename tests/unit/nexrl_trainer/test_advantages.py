"""Advantages against plain loops, and their invariants."""

from collections.abc import Sequence
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.algorithm import Advantage
from nexrl.spec.advantages import BATCH_BASELINES, DISTILLATION, GROUP_BASELINES
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl_trainer.advantages import (
    ADVANTAGES,
    advantage_function,
    batch_scaled_group_advantages,
    compared_groups,
    group_mean_advantages,
    group_standardized_advantages,
    leave_one_out_advantages,
    max_likelihood_advantages,
    pass_at_k_advantages,
    zero_variance_samples,
)

# Group 7: rewards 0, 1, 1; group 3: 2, 4; interleaved, as completions arrive.
REWARDS_B = np.array([0.0, 2.0, 1.0, 4.0, 1.0])
GROUPS_B = np.array([7, 3, 7, 3, 7])


def test_the_names_are_those_of_the_experiment_file() -> None:
    assert set(ADVANTAGES) == {*GROUP_BASELINES, *BATCH_BASELINES, DISTILLATION}


def named(advantage: str) -> Advantage:
    own: dict[str, dict[str, Any]] = {"pass_at_k": {"pass_k": 2}, DISTILLATION: {"teacher": {"path": "x"}}}
    return advantage_function(AlgorithmSpec.model_validate({"advantage": advantage, **own.get(advantage, {})}), Path())


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


def pass_at_k(rewards_S: Sequence[float], k: int) -> list[float]:
    """Equations 10 to 15 of arXiv 2508.10751 by listing all sets of k samples."""
    sets = list(combinations(range(len(rewards_S)), k))
    best = {members: max(rewards_S[sample] for sample in members) for members in sets}
    mean, deviation = np.mean(list(best.values())), np.std(list(best.values()))
    of_sample = [np.mean([best[each] for each in sets if sample in each]) for sample in range(len(rewards_S))]
    return [float((value - mean) / (deviation + 1e-4)) for value in of_sample]


@given(rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=2, max_size=8), data=st.data())
def test_pass_at_k_is_what_a_sample_adds_to_the_best_of_all_sets_of_k(
    rewards: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rewards) - 1))
    found_S = pass_at_k_advantages(np.array(rewards), np.zeros(len(rewards), int), pass_k=k)
    np.testing.assert_allclose(found_S, pass_at_k(rewards, k), rtol=1e-6, atol=1e-6)


def test_pass_at_k_of_zeros_and_ones_is_the_papers_closed_form() -> None:
    rewards_S, k = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), 3
    pass_rate = 1 - comb(4, k) / comb(6, k)
    sigma = np.sqrt(pass_rate * (1 - pass_rate)) + 1e-4
    right, wrong = (1 - pass_rate) / sigma, (1 - pass_rate - comb(3, k - 1) / comb(5, k - 1)) / sigma
    expected_S = np.where(rewards_S == 1, right, wrong)
    np.testing.assert_allclose(pass_at_k_advantages(rewards_S, np.zeros(6, int), pass_k=k), expected_S, rtol=1e-6)


def test_pass_at_k_of_each_group_is_its_own_and_of_a_group_of_k_or_fewer_0() -> None:
    rewards_B, groups_B = np.array([0.0, 2.0, 1.0, 4.0, 0.5]), np.array([7, 3, 7, 3, 7])
    advantages_B = pass_at_k_advantages(rewards_B, groups_B, pass_k=2)
    np.testing.assert_allclose(advantages_B[[0, 2, 4]], pass_at_k([0.0, 1.0, 0.5], 2), rtol=1e-6)
    assert not advantages_B[[1, 3]].any()


def test_a_batch_baseline_compares_all_samples_as_one_group() -> None:
    groups_B = compared_groups(AlgorithmSpec.model_validate({"advantage": "batch_mean_std"}), GROUPS_B)
    expected_B = (REWARDS_B - REWARDS_B.mean()) / (np.std(REWARDS_B, ddof=1) + 1e-4)
    np.testing.assert_allclose(ADVANTAGES["batch_mean_std"](REWARDS_B, groups_B), expected_B, rtol=1e-6)
    assert compared_groups(AlgorithmSpec.model_validate({"advantage": "rloo"}), GROUPS_B) is GROUPS_B


@pytest.mark.parametrize("name", ADVANTAGES)
@given(samples=samples)
def test_advantages_of_a_group_add_up_to_zero(name: str, samples: list[tuple[float, int]]) -> None:
    rewards_B, groups_B = (np.array(column) for column in zip(*samples, strict=True))
    advantages_B = named(name)(rewards_B, groups_B)
    for group in set(groups_B):
        assert abs(advantages_B[groups_B == group].sum()) < 1e-3


@pytest.mark.parametrize("name", ADVANTAGES)
@given(reward=st.floats(-10, 10), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(name: str, reward: float, size: int) -> None:
    rewards_B, groups_B = np.full(size, reward), np.zeros(size, int)
    assert not named(name)(rewards_B, groups_B).any()
    assert zero_variance_samples(rewards_B, groups_B).all()


def test_zero_variance_is_judged_by_group_not_by_advantage() -> None:
    # The middle reward of the first group has advantage 0, and its group still says which sample was better.
    rewards_B, groups_B = np.array([0.0, 0.5, 1.0, 0.3, 0.3]), np.array([0, 0, 0, 1, 1])
    assert zero_variance_samples(rewards_B, groups_B).tolist() == [False, False, False, True, True]
