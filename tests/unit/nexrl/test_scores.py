"""Statistics of an evaluation against the formulas of their papers."""

from itertools import combinations
from math import comb, sqrt
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.best_of_k import mean_best_of_k
from nexrl.local.scores import ScoredSample, score_statistics, standard_error

rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=1, max_size=7)


@given(passes=st.lists(st.booleans(), min_size=1, max_size=12), data=st.data())
def test_of_zeros_and_ones_the_best_of_k_is_pass_at_k_of_chen_et_al(passes: list[bool], data: st.DataObject) -> None:
    size, passed, k = len(passes), sum(passes), data.draw(st.integers(1, len(passes)))
    expected = 1 - comb(size - passed, k) / comb(size, k)
    assert mean_best_of_k(np.array(passes, float), k) == pytest.approx(expected)


@given(values=rewards, data=st.data())
def test_the_best_of_k_is_the_mean_over_all_sets_of_k(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    expected = fmean(max(members) for members in combinations(values, k))
    assert mean_best_of_k(np.array(values), k) == pytest.approx(expected)


@given(values=st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_with_one_sample_for_each_task_the_standard_error_is_the_usual_one(values: list[float]) -> None:
    assert standard_error([[value] for value in values]) == pytest.approx(stdev(values) / sqrt(len(values)), abs=1e-9)


def test_equal_samples_of_a_task_count_as_one() -> None:
    assert standard_error([[1.0] * 8, [0.0] * 8]) == pytest.approx(standard_error([[1.0], [0.0]]))
    assert standard_error([[1.0, 0.0]]) is None


def test_each_score_has_its_own_statistics_and_the_reward_is_first() -> None:
    samples = [
        ScoredSample("0", {"exact": 1.0, "reward": 0.5}),
        ScoredSample("0", {"exact": 0.0, "reward": 0.0}),
        ScoredSample("0", {"reward": 0.25}),
        ScoredSample("1", {"exact": 0.0, "reward": 0.25}),  # its other samples have failed
    ]
    found = score_statistics(samples, samples_per_task=3)
    assert list(found) == ["reward", "exact"]
    assert found["reward"].mean == 0.25
    assert found["reward"].pass_at_k == {1: 0.25, 2: pytest.approx((0.5 + 0.5 + 0.25) / 3), 3: 0.5}
    assert found["exact"].mean == pytest.approx(1 / 3)
    assert found["exact"].pass_at_k == {1: 0.25, 2: 1.0}, "a task with fewer than k samples is left out"
