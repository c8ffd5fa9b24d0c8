"""Policy losses: pure functions of the tokens that a step trains.

Suffixes: _T trained tokens, flat (no padding, no masked token), _V vocabulary.
Each loss is a weighted sum over tokens. `weights_T` carries mask, aggregation and the step's one GLOBAL denominator, so
the losses of any split of a step into micro-batches, or ranks, add up to the loss of the whole step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at. All float32, shape [T].

    `logprobs_T` come from the model being trained, `rollout_logprobs_T` were recorded when the tokens were sampled;
    both at the sampling temperature.
    """

    logprobs_T: Tensor
    rollout_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor


@dataclass(frozen=True)
class LossOutputs:
    """`loss` is a scalar to call backward on; `clipped_T` (bool) marks tokens whose ratio met a limit."""

    loss: Tensor
    clipped_T: Tensor


def reinforce_loss(inputs: LossInputs) -> LossOutputs:
    """-sum w * A * log p (Williams, 1992)."""
    loss = -(inputs.weights_T * inputs.advantages_T * inputs.logprobs_T).sum()
    return LossOutputs(loss, torch.zeros_like(inputs.logprobs_T, dtype=torch.bool))


def clipped_policy_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """-sum w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), r = p / p_rollout.

    PPO (arXiv 1707.06347); clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476).
    """
    ratio_T = (inputs.logprobs_T - inputs.rollout_logprobs_T).exp()
    unclipped_T = ratio_T * inputs.advantages_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * inputs.advantages_T
    loss = -(inputs.weights_T * torch.minimum(unclipped_T, clipped_T)).sum()
    return LossOutputs(loss, (clipped_T < unclipped_T).detach())


def cispo_loss(inputs: LossInputs, *, max_ratio: float) -> LossOutputs:
    """-sum w * stop_gradient(min(r, max_ratio)) * A * log p, r = p / p_rollout.

    CISPO (arXiv 2506.13585) in ScaleRL's one-sided form (arXiv 2510.13786): a token beyond the limit keeps a
    gradient, with a bounded weight.
    """
    ratio_T = (inputs.logprobs_T - inputs.rollout_logprobs_T).detach().exp()
    loss = -(inputs.weights_T * ratio_T.clamp(max=max_ratio) * inputs.advantages_T * inputs.logprobs_T).sum()
    return LossOutputs(loss, ratio_T > max_ratio)


def reference_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """k3 = exp(d) - d - 1 with d = log p_reference - log p: unbiased for KL(p || reference), never negative.

    Source: J. Schulman, "Approximating KL divergence" (2020). Shape [T].
    """
    difference_T = reference_logprobs_T - logprobs_T
    return torch.expm1(difference_T) - difference_T


def token_entropy(logprobs_TV: Tensor) -> Tensor:
    """-sum_v p log p of each row of normalised log-probabilities. Shape [T], nats."""
    return -(logprobs_TV.exp() * logprobs_TV).sum(-1)
