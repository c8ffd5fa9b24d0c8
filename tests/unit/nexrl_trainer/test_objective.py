"""Policy loss, entropy bonus and KL penalty together; estimators of the KL divergence."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nexrl.algorithm import LossInputs
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.batching import token_weights
from nexrl_trainer.losses import token_entropy
from nexrl_trainer.objective import Objective, kl_penalty, reference_kl


def test_reference_kl_is_zero_where_equal_and_positive_elsewhere() -> None:
    logprobs_T = torch.tensor([-1.0, -1.0, -1.0])
    kl_T = reference_kl(logprobs_T, torch.tensor([-1.0, -2.0, -0.5]))
    np.testing.assert_allclose(kl_T, [0, np.exp(-1) + 1 - 1, np.exp(0.5) - 0.5 - 1], rtol=1e-6)


def test_expected_reference_kl_is_the_kl_divergence() -> None:
    policy_V, reference_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = (policy_V * (policy_V / reference_V).log()).sum()
    assert torch.isclose((policy_V * reference_kl(policy_V.log(), reference_V.log())).sum(), expected)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
def test_a_penalty_on_one_absurd_logprob_leaves_every_gradient_finite(
    estimator: Literal["k2", "k3", "k3_unbiased"],
) -> None:
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


def test_k2_has_the_gradient_of_the_kl_divergence_on_policy() -> None:
    logits_V = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logprobs_V = logits_V.log_softmax(-1)
    exact = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    zeros_V = torch.zeros_like(reference_V)
    inputs = LossInputs(logprobs_V, logprobs_V.detach(), zeros_V, zeros_V, zeros_V.long())
    estimate = (logprobs_V.detach().exp() * kl_penalty(inputs, reference_V, AlgorithmSpec(kl_estimator="k2"))).sum()
    wanted_V = torch.autograd.grad(exact, logits_V, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(estimate, logits_V)[0], wanted_V)


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


def gradient_of(loss: torch.Tensor, logprobs_T: torch.Tensor) -> NDArray[Any]:
    (gradient_T,) = torch.autograd.grad(loss, logprobs_T)
    return gradient_T.numpy()
