"""Losses against NumPy, value and gradient, and the identity that all of them share on policy."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nexrl.algorithm import LossInputs, LossOutputs
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.variants import value_of, variants
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer import losses
from nexrl_trainer.batching import token_weights
from nexrl_trainer.losses import (
    Objective,
    cispo_loss,
    clipped_policy_loss,
    kl_penalty,
    reference_kl,
    reinforce_loss,
    token_entropy,
)

Array = NDArray[np.float64]
Reference = Callable[[Array, Array, Array], tuple[Array, Array]]  # logprobs, rollout, advantages -> value, derivative

# Ratios e^-1 .. e^2 against both signs of the advantage: every branch of every loss.
ROLLOUT_T = np.full(10, -2.0)
LOGPROBS_T = ROLLOUT_T + np.repeat([-1.0, -0.1, 0.0, 0.1, 2.0], 2)
ADVANTAGES_T = np.tile([1.5, -0.5], 5)
WEIGHTS_T = np.arange(1, 11) / 55


def reinforce(logprobs_T: Array, rollout_T: Array, advantages_T: Array) -> tuple[Array, Array]:
    return -advantages_T * logprobs_T, -advantages_T


def clipped(logprobs_T: Array, rollout_T: Array, advantages_T: Array) -> tuple[Array, Array]:
    ratio_T = np.exp(logprobs_T - rollout_T)
    bounded_T = np.clip(ratio_T, 0.8, 1.28) * advantages_T
    is_free_T = ratio_T * advantages_T <= bounded_T
    return -np.minimum(ratio_T * advantages_T, bounded_T), np.where(is_free_T, -ratio_T * advantages_T, 0)


def cispo(logprobs_T: Array, rollout_T: Array, advantages_T: Array) -> tuple[Array, Array]:
    weight_T = np.minimum(np.exp(logprobs_T - rollout_T), 5.0)
    return -weight_T * advantages_T * logprobs_T, -weight_T * advantages_T


LOSSES: dict[str, tuple[Callable[[LossInputs], LossOutputs], Reference]] = {
    "reinforce": (reinforce_loss, reinforce),
    "ppo_clip": (partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28), clipped),
    "cispo": (partial(cispo_loss, clip_high=4.0), cispo),
}


def inputs_of(logprobs_T: torch.Tensor, rollout_T: Array) -> LossInputs:
    rollout, advantages, weights = map(torch.from_numpy, (rollout_T, ADVANTAGES_T, WEIGHTS_T))
    return LossInputs(logprobs_T, rollout, advantages, weights, torch.zeros(len(logprobs_T), dtype=torch.int64))


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_numpy_reference(name: str) -> None:
    loss, reference = LOSSES[name]
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    outputs = loss(inputs_of(logprobs_T, ROLLOUT_T))
    gradient_T = gradient_of(outputs.loss, logprobs_T)
    value_T, derivative_T = reference(LOGPROBS_T, ROLLOUT_T, ADVANTAGES_T)
    np.testing.assert_allclose(outputs.loss.item(), (WEIGHTS_T * value_T).sum(), rtol=1e-12)
    np.testing.assert_allclose(gradient_T, WEIGHTS_T * derivative_T, rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_reinforce(name: str) -> None:
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    outputs = LOSSES[name][0](inputs_of(logprobs_T, LOGPROBS_T))
    np.testing.assert_array_equal(gradient_of(outputs.loss, logprobs_T), -WEIGHTS_T * ADVANTAGES_T)
    assert not outputs.clipped_T.any()


def test_clipped_tokens_are_those_without_gradient() -> None:
    logprobs_T = torch.tensor(LOGPROBS_T, requires_grad=True)
    outputs = LOSSES["ppo_clip"][0](inputs_of(logprobs_T, ROLLOUT_T))
    assert outputs.clipped_T.tolist() == (gradient_of(outputs.loss, logprobs_T) == 0).tolist()
    assert outputs.clipped_T.sum() == 2  # too low with a negative advantage, too high with a positive one


def test_reference_kl_is_zero_where_equal_and_positive_elsewhere() -> None:
    logprobs_T = torch.tensor([-1.0, -1.0, -1.0])
    kl_T = reference_kl(logprobs_T, torch.tensor([-1.0, -2.0, -0.5]))
    np.testing.assert_allclose(kl_T, [0, np.exp(-1) + 1 - 1, np.exp(0.5) - 0.5 - 1], rtol=1e-6)


def test_expected_reference_kl_is_the_kl_divergence() -> None:
    policy_V, reference_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = (policy_V * (policy_V / reference_V).log()).sum()
    assert torch.isclose((policy_V * reference_kl(policy_V.log(), reference_V.log())).sum(), expected)


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


@pytest.mark.parametrize("estimator", ["k3", "k3_unbiased"])
def test_a_penalty_on_one_absurd_logprob_leaves_every_gradient_finite(estimator: Literal["k3", "k3_unbiased"]) -> None:
    logprobs_T = torch.tensor([-9000.0, 0.0, -1.0], requires_grad=True)
    other_T, zeros_T = torch.tensor([0.0, -9000.0, -1.0]), torch.zeros(3)  # of the rollout and of the reference model
    inputs = LossInputs(logprobs_T, other_T, zeros_T, zeros_T, zeros_T.long())
    kl_T = kl_penalty(inputs, other_T, AlgorithmSpec(kl_estimator=estimator))
    assert torch.isfinite(kl_T).all()
    assert np.isfinite(gradient_of(kl_T.sum(), logprobs_T)).all()


def test_the_unbiased_penalty_has_value_and_gradient_of_the_kl_divergence_whatever_policy_sampled() -> None:
    logits_V = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    rollout_V = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    logprobs_V = logits_V.log_softmax(-1)
    exact = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    zeros_V = torch.zeros_like(rollout_V)
    inputs = LossInputs(logprobs_V, rollout_V.log(), zeros_V, zeros_V, zeros_V.long())
    unbiased, biased = (
        (rollout_V * kl_penalty(inputs, reference_V, AlgorithmSpec(kl_estimator=name))).sum()
        for name in ("k3_unbiased", "k3")
    )
    assert torch.isclose(unbiased, exact)
    wanted_V = torch.autograd.grad(exact, logits_V, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(unbiased, logits_V, retain_graph=True)[0], wanted_V)
    assert not torch.allclose(torch.autograd.grad(biased, logits_V)[0], wanted_V, atol=0.01)


def test_the_names_are_those_of_the_experiment_file() -> None:
    assert set(losses.LOSSES) == {value_of(variant, "loss") for variant in variants(AlgorithmSpec)["loss"]} - {None}


def test_under_sequence_aggregation_entropy_and_penalty_are_means_over_sequences_of_each_ones_token_mean() -> None:
    batch = TrainBatch.pack(
        [TrainSequence([0] * n, [False] + [True] * (n - 1), [0.0] * n, 0.0) for n in (2, 4)]  # 1 and 3 trained tokens
    )
    weights_T = torch.from_numpy(token_weights(batch, "sequence")[batch.loss_mask_N])
    logprobs_TV = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.3, 0.7], [0.8, 0.2]]).log()
    inputs = LossInputs(logprobs_TV[:, 0], logprobs_TV[:, 0], torch.zeros(4), weights_T, torch.tensor([0, 1, 1, 1]))
    settings = AlgorithmSpec(loss="reinforce", entropy_coefficient=2.0, kl_coefficient=3.0)
    terms = Objective(settings, Path())(inputs, token_entropy(logprobs_TV), logprobs_TV[:, 1])

    def mean_of_means(values_T: torch.Tensor) -> torch.Tensor:
        return (values_T[0] + values_T[1:].mean()) / 2

    expected = -2 * mean_of_means(token_entropy(logprobs_TV)) + 3 * mean_of_means(terms.kl_T)
    torch.testing.assert_close(terms.objective, expected)


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    assert torch.allclose(token_entropy(torch.full((2, 8), 1 / 8).log()), torch.tensor(8.0).log())


def gradient_of(loss: torch.Tensor, logprobs_T: torch.Tensor) -> NDArray[Any]:
    (gradient_T,) = torch.autograd.grad(loss, logprobs_T)
    return gradient_T.numpy()
