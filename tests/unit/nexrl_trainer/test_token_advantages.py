"""Advantages of tokens against plain loops; and a task that they learn where one reward per sample does not."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexrl.algorithm import Batch, ProcessorContext, Sample, Trajectory
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.overlong_penalty import OverlongPenaltySpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.advantages import advantage_function
from nexrl_trainer.processor import GroupProcessor
from nexrl_trainer.token_advantages import returns_to_go, token_rewards

Array = NDArray[Any]


def no_model(sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
    raise AssertionError("no model is needed")


def trajectory(mask: Sequence[int], rewards: Sequence[float] | None, reward: float | None = None) -> Trajectory:
    """A trajectory of these rewards per token; its own is their sum unless it is given."""
    total = sum(rewards or [0.0]) if reward is None else reward
    columns = {} if rewards is None else {"token_rewards": np.array(rewards, np.float32)}
    size = len(mask)
    return Trajectory(
        np.zeros(size, np.int64), np.array(mask, bool), np.zeros(size, np.float32), total, columns=columns
    )


def one(mask: Sequence[int], rewards: Sequence[float] | None, reward: float | None = None) -> Sample:
    return Sample("0.0", [trajectory(mask, rewards, reward)])


def fit(groups: Sequence[Sequence[Sample]], **algorithm: Any) -> TrainBatch:
    spec = AlgorithmSpec.model_validate(algorithm)
    context = ProcessorContext(spec, advantage_function(spec, Path()), *3 * (no_model,))
    return TrainBatch.pack(GroupProcessor(context).fit(Batch(0, groups)).sequences)


def generated(batch: TrainBatch) -> list[float]:
    values: list[float] = batch.advantages_N[batch.loss_mask_N].tolist()
    return values


def plain_returns(rewards: Sequence[float], mask: Sequence[bool], discount: float) -> Iterator[float]:
    """The return of each generated token, by its definition."""
    for t in (t for t, is_generated in enumerate(mask) if is_generated):
        yield sum(discount ** sum(mask[t + 1 : s + 1]) * rewards[s] for s in range(t, len(mask)))


def standardized(values: Sequence[float]) -> Array:
    array = np.array(values)
    scaled: Array = (array - array.mean()) / (array.std(ddof=1) + 1e-4)
    return scaled


tokens = st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.0, 1.0, -0.5, 3.0])), min_size=1, max_size=12)


@given(tokens, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_returns_are_discounted_sums_that_skip_context(sampled: list[tuple[bool, float]], discount: float) -> None:
    mask, rewards = [False, *(m for m, _ in sampled)], [0.0, *(r for _, r in sampled)]
    found = returns_to_go(np.array(rewards), np.array(mask), discount)[mask]
    np.testing.assert_allclose(found, list(plain_returns(rewards, mask, discount)), rtol=1e-6, atol=1e-12)


@given(st.lists(tokens, min_size=1, max_size=4), st.sampled_from([0.0, 0.9, 1.0]))
def test_return_to_go_is_whitened_over_the_generated_tokens_of_the_batch(
    sampled: list[list[tuple[bool, float]]], discount: float
) -> None:
    masks = [[False, *(m for m, _ in each), True] for each in sampled]
    rewards = [[0.0, *(r for _, r in each), 1.0] for each in sampled]
    samples = [[one(m, r)] for m, r in zip(masks, rewards, strict=True)]
    found = fit(samples, advantage="return_to_go", discount=discount, zeroVarianceGroups="keep")
    returns = [g for m, r in zip(masks, rewards, strict=True) for g in plain_returns(r, m, discount)]
    expected = standardized(returns) if len(set(returns)) > 1 else np.zeros(len(returns))
    np.testing.assert_allclose(generated(found), expected, rtol=1e-5, atol=1e-6)


def test_turns_are_normalised_in_their_group_and_added_up_from_each_on() -> None:
    group = [one([0, 1, 1, 0, 1], [0, 0, 1, 0, 3]), one([0, 1, 0, 0, 1], [0, 0, 0, 0, 2])]
    a, b, c, d = standardized([1, 3, 0, 2])
    found = fit([group, [one([0, 1], [0, 9]), one([0, 1], [0, 9])]], advantage="turn_mean_std")
    np.testing.assert_allclose(generated(found), [a + b, a + b, b, c + d, d], rtol=1e-5)


def test_samples_of_one_turn_have_the_advantages_of_group_mean_std() -> None:
    group = [one([0, 1, 1], None, reward) for reward in (0.0, 1.0, 0.25)]
    by_turn, by_sample = (fit([group], advantage=name) for name in ("turn_mean_std", "group_mean_std"))
    np.testing.assert_allclose(generated(by_turn), generated(by_sample), rtol=1e-6)


def test_samples_of_one_token_have_the_returns_of_batch_mean_std() -> None:
    group = [one([0, 1], None, reward) for reward in (0.0, 1.0, 0.25)]
    by_token, by_sample = (fit([group], advantage=name) for name in ("return_to_go", "batch_mean_std"))
    np.testing.assert_allclose(generated(by_token), generated(by_sample), rtol=1e-6)


def test_what_the_column_leaves_of_the_reward_belongs_to_the_last_generated_token() -> None:
    sample = one([0, 1, 0, 1, 0], [0, 0.5, 0, 0.25, 0], 2.0)
    assert token_rewards(sample, 2.0).tolist() == [0, 0.5, 0, 1.5, 0]
    assert token_rewards(one([0, 1, 1], None, 1.0), 1.0).tolist() == [0, 0, 1]


def test_a_reward_in_a_later_trajectory_counts_for_the_earlier_one() -> None:
    parts = [trajectory([0, 1], [0, 0], 1.0), trajectory([0, 1], [0, 1.0], 1.0)]
    found = fit([[Sample("0.0", parts), one([0, 1], None, 0.0)]], advantage="return_to_go")
    np.testing.assert_allclose(generated(found), standardized([1, 1, 0]), rtol=1e-5)


def test_a_penalty_is_a_reward_of_the_last_token() -> None:
    penalty = OverlongPenaltySpec(after_tokens=0, full_tokens=2, penalty=1.0)
    group = [one([0, 1, 1], [0, 1, 0]), one([0, 1], [0, 0])]
    found = fit([group], advantage="return_to_go", discount=0.0, overlongPenalty=penalty)
    np.testing.assert_allclose(generated(found), standardized([1, -1, -0.5]), rtol=1e-5)


@pytest.mark.parametrize("advantage", ["return_to_go", "turn_mean_std"])
def test_samples_of_equal_sums_are_trained_if_their_parts_differ(advantage: str) -> None:
    differing = [one([0, 1, 0, 1], [0, 1, 0, 0]), one([0, 1, 0, 1], [0, 0, 0, 1])]
    equal = [one([0, 1, 0, 1], None, 1.0)] * 2
    assert len(fit([differing], advantage=advantage).lengths_B) == 2
    assert len(fit([equal], advantage="return_to_go").lengths_B) == 0


STEPS, CHOICES, GROUP = 16, 4, 8


def learned(**algorithm: Any) -> float:
    """The mean reward per step after 15 updates of a policy whose choice at each step is rewarded if it is the first.

    The policy is a table of logits, one row per step; an update is REINFORCE with the advantages of the processor.
    """
    random = np.random.default_rng(7)
    logits = np.zeros((STEPS, CHOICES))
    for _ in range(15):
        policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        choices = (random.random((GROUP, STEPS, 1)) > policy.cumsum(1)).sum(2)
        mask = [0, *[1] * STEPS]
        samples = [one(mask, [0.0, *(row == 0).astype(float)]) for row in choices]
        found = fit([samples], **algorithm)
        advantages = found.advantages_N.reshape(-1, STEPS + 1)[:, 1:]
        if len(advantages) < GROUP:
            continue
        for row, advantage in zip(choices, advantages, strict=True):
            chosen = np.eye(CHOICES)[row]
            logits += 0.5 / GROUP * advantage[:, np.newaxis] * (chosen - policy)
    return float((np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[:, 0].mean())


def test_rewards_of_steps_teach_what_one_reward_per_sample_does_not() -> None:
    by_step, by_sample = learned(advantage="return_to_go", discount=0.0), learned(advantage="batch_mean_std")
    assert by_step > 0.9
    assert by_sample < by_step - 0.2
