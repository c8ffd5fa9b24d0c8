"""Losses against NumPy, value and gradient, and the identity that all of them share on policy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nexrl_trainer.losses import (
    LossInputs,
    LossOutputs,
    cispo_loss,
    clipped_policy_loss,
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
    "cispo": (partial(cispo_loss, max_ratio=5.0), cispo),
}


def inputs_of(logprobs_T: torch.Tensor, rollout_T: Array) -> LossInputs:
    columns = (torch.from_numpy(column) for column in (rollout_T, ADVANTAGES_T, WEIGHTS_T))
    return LossInputs(logprobs_T, *columns)


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


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    assert torch.allclose(token_entropy(torch.full((2, 8), 1 / 8).log()), torch.tensor(8.0).log())


def gradient_of(loss: torch.Tensor, logprobs_T: torch.Tensor) -> NDArray[Any]:
    (gradient_T,) = torch.autograd.grad(loss, logprobs_T)
    return gradient_T.numpy()
