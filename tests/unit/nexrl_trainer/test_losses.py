"""Losses against NumPy, value and gradient, and the identity that all of them share on policy."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexrl.algorithm import LossInputs, LossOutputs
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.variants import value_of, variants
from nexrl_trainer import losses
from nexrl_trainer.losses import (
    PROXIMAL,
    cispo_loss,
    clipped_policy_loss,
    cross_entropy_loss,
    decoupled_ppo_loss,
    dppo_tv_loss,
    gspo_loss,
    reinforce_loss,
    sapo_loss,
    sequence_means,
    token_entropy,
)
from nexrl_trainer.preference import PREFERENCE_LOSSES

Array: TypeAlias = NDArray[np.float64]
Reference: TypeAlias = Callable[[Array, Array, Array, NDArray[np.int64]], tuple[Array, Array]]
"""Returns value and derivative by log p of each token, from log p, log p_rollout, advantages and sequences."""

# Ratios e^-1 .. e^2 against both signs of the advantage: every branch of every loss.
ROLLOUT_T = np.full(10, -2.0)
LOGPROBS_T = ROLLOUT_T + np.repeat([-1.0, -0.1, 0.0, 0.1, 2.0], 2)
ADVANTAGES_T = np.tile([1.5, -0.5], 5)
WEIGHTS_T = np.arange(1, 11) / 55
SEQUENCE_T = np.array([2, 2, 0, 0, 0, 1, 1, 1, 2, 2])


def reinforce(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    return -advantages_T * logprobs_T, -advantages_T


def cross_entropy(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    return -logprobs_T, np.full(logprobs_T.shape, -1.0)


def surrogate(ratio_T: Array, advantages_T: Array, low: float, high: float) -> tuple[Array, Array]:
    """PPO's clip of a ratio whose derivative by log p is the ratio itself."""
    bounded_T = np.clip(ratio_T, 1 - low, 1 + high) * advantages_T
    is_free_T = ratio_T * advantages_T <= bounded_T
    return -np.minimum(ratio_T * advantages_T, bounded_T), np.where(is_free_T, -ratio_T * advantages_T, 0)


def clipped(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    return surrogate(np.exp(logprobs_T - rollout_T), advantages_T, 0.2, 0.28)


def dual_clipped(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    value_T, derivative_T = clipped(logprobs_T, rollout_T, advantages_T, None)
    is_cut_T = (advantages_T < 0) & (value_T > -3 * advantages_T)
    return np.where(is_cut_T, -3 * advantages_T, value_T), np.where(is_cut_T, 0, derivative_T)


def decoupled(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    """In the first update of a step, where p is the policy at its start."""
    value_T = -np.minimum(np.exp(logprobs_T - rollout_T), 2.0) * advantages_T
    return value_T, value_T


def gspo(
    logprobs_T: Array, rollout_T: Array, advantages_T: Array, sequence_T: NDArray[np.int64]
) -> tuple[Array, Array]:
    means = {s: (logprobs_T - rollout_T)[sequence_T == s].mean() for s in set(sequence_T.tolist())}
    return surrogate(np.exp([means[s] for s in sequence_T.tolist()]), advantages_T, 0.03, 0.04)


def cispo(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    weight_T = np.minimum(np.exp(logprobs_T - rollout_T), 5.0)
    return -weight_T * advantages_T * logprobs_T, -weight_T * advantages_T


def dppo_tv(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    moved_T = np.exp(logprobs_T) - np.exp(rollout_T)
    is_masked_T = ((advantages_T > 0) & (moved_T > 0.2)) | ((advantages_T < 0) & (moved_T < -0.05))
    value_T = np.where(is_masked_T, 0, -np.exp(logprobs_T - rollout_T) * advantages_T)
    return value_T, value_T


def sapo(logprobs_T: Array, rollout_T: Array, advantages_T: Array, _: object) -> tuple[Array, Array]:
    ratio_T, tau_T = np.exp(logprobs_T - rollout_T), np.where(advantages_T > 0, 1.0, 1.05)
    gate_T = 1 / (1 + np.exp(-tau_T * (ratio_T - 1)))
    return -advantages_T * 4 / tau_T * gate_T, -advantages_T * 4 * gate_T * (1 - gate_T) * ratio_T


DECOUPLED = partial(decoupled_ppo_loss, clip_low=0.2, clip_high=0.28, weight_limit=2.0)
LOSSES: dict[str, tuple[Callable[[LossInputs], LossOutputs], Reference]] = {
    "reinforce": (reinforce_loss, reinforce),
    "cross_entropy": (cross_entropy_loss, cross_entropy),
    "ppo_clip": (partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28), clipped),
    "dual_clip": (partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28, dual_clip=3.0), dual_clipped),
    "decoupled_ppo": (DECOUPLED, decoupled),
    "gspo": (partial(gspo_loss, clip_low=0.03, clip_high=0.04), gspo),
    "cispo": (partial(cispo_loss, clip_high=4.0), cispo),
    "dppo_tv": (partial(dppo_tv_loss, clip_low=0.05, clip_high=0.2), dppo_tv),
    "sapo": (partial(sapo_loss, positive_temperature=1.0, negative_temperature=1.05), sapo),
}
WITH_ADVANTAGE = sorted(LOSSES.keys() - {"cross_entropy"})


def inputs_of(
    logprobs_T: torch.Tensor,
    rollout_T: Array,
    advantages_T: Array = ADVANTAGES_T,
    weights_T: Array = WEIGHTS_T,
    sequence_T: NDArray[np.int64] = SEQUENCE_T,
) -> LossInputs:
    rollout, advantages, weights, sequence = map(torch.from_numpy, (rollout_T, advantages_T, weights_T, sequence_T))
    return LossInputs(logprobs_T, rollout, advantages, weights, sequence)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_numpy_reference(name: str) -> None:
    loss, reference = LOSSES[name]
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    outputs = loss(inputs_of(logprobs_T, ROLLOUT_T))
    gradient_T = gradient_of(outputs.loss, logprobs_T)
    value_T, derivative_T = reference(LOGPROBS_T, ROLLOUT_T, ADVANTAGES_T, SEQUENCE_T)
    np.testing.assert_allclose(outputs.loss.item(), (WEIGHTS_T * value_T).sum(), rtol=1e-12)
    np.testing.assert_allclose(gradient_T, WEIGHTS_T * derivative_T, rtol=1e-12)


tokens = st.tuples(
    st.floats(-6, 0), st.floats(-6, 0), st.floats(-3, 3), st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 4)
)


@pytest.mark.parametrize("name", LOSSES)
@given(rows=st.lists(tokens, min_size=1, max_size=40))
def test_value_and_gradient_equal_the_reference_for_any_tokens_weights_and_sequences(
    name: str, rows: list[tuple[float, float, float, float, int]]
) -> None:
    loss, reference = LOSSES[name]
    logprobs, rollout_T, advantages_T, weights_T, labels = (np.array(column) for column in zip(*rows, strict=True))
    sequence_T = np.unique(labels, return_inverse=True)[1]
    logprobs_T = torch.tensor(logprobs, requires_grad=True)
    outputs = loss(inputs_of(logprobs_T, rollout_T, advantages_T, weights_T, sequence_T))
    value_T, derivative_T = reference(logprobs, rollout_T, advantages_T, sequence_T)
    np.testing.assert_allclose(outputs.loss.item(), (weights_T * value_T).sum(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradient_of(outputs.loss, logprobs_T), weights_T * derivative_T, rtol=1e-6, atol=1e-9)


@given(rows=st.lists(st.tuples(*[st.floats(-6, 0)] * 3, st.floats(-3, 3)), min_size=1, max_size=40))
def test_decoupled_ppo_clips_around_the_start_of_the_step_and_weighs_by_its_distance_from_the_rollout(
    rows: list[tuple[float, float, float, float]],
) -> None:
    logprobs, start_T, rollout_T, advantages_T = (np.array(column) for column in zip(*rows, strict=True))
    logprobs_T, weights_T = torch.tensor(logprobs, requires_grad=True), np.linspace(0, 1, len(rows))
    inputs = inputs_of(logprobs_T, rollout_T, advantages_T, weights_T, np.zeros(len(rows), np.int64))
    outputs = DECOUPLED(replace(inputs, columns={PROXIMAL: torch.from_numpy(start_T)}))
    value_T, derivative_T = surrogate(np.exp(logprobs - start_T), advantages_T, 0.2, 0.28)
    all_T = weights_T * np.minimum(np.exp(start_T - rollout_T), 2.0)
    np.testing.assert_allclose(outputs.loss.item(), (all_T * value_T).sum(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradient_of(outputs.loss, logprobs_T), all_T * derivative_T, rtol=1e-6, atol=1e-9)


def test_the_first_update_of_decoupled_ppo_is_that_of_cispo_with_the_same_limit() -> None:
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    inputs = inputs_of(logprobs_T, ROLLOUT_T)
    wanted_T = gradient_of(cispo_loss(inputs, clip_high=1.0).loss, logprobs_T)
    np.testing.assert_allclose(gradient_of(DECOUPLED(inputs).loss, logprobs_T), wanted_T, rtol=1e-12)


@pytest.mark.parametrize("name", WITH_ADVANTAGE)
def test_on_policy_gradient_is_reinforce(name: str) -> None:
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    outputs = LOSSES[name][0](inputs_of(logprobs_T, LOGPROBS_T))
    np.testing.assert_allclose(gradient_of(outputs.loss, logprobs_T), -WEIGHTS_T * ADVANTAGES_T, rtol=1e-15)
    assert not outputs.clipped_T.any()


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "dppo_tv"])
def test_clipped_tokens_are_those_without_gradient(name: str) -> None:
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    outputs = LOSSES[name][0](inputs_of(logprobs_T, ROLLOUT_T))
    assert outputs.clipped_T.tolist() == (gradient_of(outputs.loss, logprobs_T) == 0).tolist()
    assert 0 < outputs.clipped_T.sum() < len(LOGPROBS_T)


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_of_weight_0_matter_to_the_sequence_ratio_only(name: str) -> None:
    weights_T = WEIGHTS_T * (SEQUENCE_T != 1)
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    outputs = LOSSES[name][0](inputs_of(logprobs_T, ROLLOUT_T, weights_T=weights_T))
    assert not gradient_of(outputs.loss, logprobs_T)[SEQUENCE_T == 1].any()


def test_sequence_means_are_those_of_each_sequence_in_any_order() -> None:
    means_T = sequence_means(torch.tensor([1.0, 5.0, 3.0, 7.0]), torch.tensor([1, 0, 1, 0]))
    assert means_T.tolist() == [2.0, 6.0, 2.0, 6.0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rollout_logprob", [-9000.0, 0.0])
def test_one_token_with_an_absurd_logprob_leaves_every_gradient_finite(name: str, rollout_logprob: float) -> None:
    rollout_T, logprobs_T = ROLLOUT_T.copy(), LOGPROBS_T.copy()
    rollout_T[:2] = rollout_logprob
    logprobs_T[:2] = -9000.0 - rollout_logprob  # a ratio of e^9000, or of e^-9000, with both signs of the advantage
    tensor_T = torch.tensor(logprobs_T, dtype=torch.float32, requires_grad=True)
    outputs = LOSSES[name][0](inputs_of(tensor_T, rollout_T))
    assert torch.isfinite(outputs.loss)
    assert np.isfinite(gradient_of(outputs.loss, tensor_T)).all()


def test_the_names_are_those_of_the_experiment_file() -> None:
    assert {*losses.LOSSES, *PREFERENCE_LOSSES} == {
        value_of(variant, "loss") for variant in variants(AlgorithmSpec)["loss"]
    } - {None}


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    assert torch.allclose(token_entropy(torch.full((2, 8), 1 / 8).log()), torch.tensor(8.0).log())


def gradient_of(loss: torch.Tensor, logprobs_T: torch.Tensor) -> NDArray[Any]:
    (gradient_T,) = torch.autograd.grad(loss, logprobs_T)
    return gradient_T.numpy()
