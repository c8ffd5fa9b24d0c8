"""Policy losses: pure functions of the tokens that a step trains.

Suffixes: _T trained tokens, flat (no padding, no masked token), _S sequences, _V vocabulary.
Each loss is a weighted sum over tokens. `weights_T` carries mask, aggregation and the step's one GLOBAL denominator, so
the losses of any split of a step into micro-batches, or ranks, add up to the loss of the whole step. r = p / p_rollout
is the ratio of a token. On policy, where r = 1, the gradient of each but cross-entropy is that of REINFORCE.

Every log ratio is clamped to ±MAX_LOG_RATIO first: exp overflows float32 above 88.7, and then 0 * inf makes the
gradient NaN even where a clip removes the token. A clamped token has no gradient through its ratio.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nexrl.algorithm import LossInputs, LossOutputs

MAX_LOG_RATIO = 20.0
"""The limit of verl (verl/trainer/ppo/core_algos.py, compute_policy_loss): ratios stay within e^-20 and e^20."""

PROXIMAL = "proximal_logprobs"
"""Column with the log-probabilities under the policy at the start of the step, which the trainer adds for a loss of
PROXIMAL_LOSSES if the step has several updates."""
PROXIMAL_LOSSES = frozenset({"decoupled_ppo"})


def proximal_logprobs(inputs: LossInputs) -> Tensor:
    """Log p at the start of the step, without a gradient. In the first update of a step that is log p. Shape [T]."""
    return inputs.columns.get(PROXIMAL, inputs.logprobs_T).detach()


def log_ratio(logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """log p - log p_other, clamped to ±MAX_LOG_RATIO. Shape [T]."""
    return (logprobs_T - other_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return the mean of each token's sequence. Shape [T]."""
    sums_S = values_T.new_zeros(int(sequence_T.max()) + 1).index_add(0, sequence_T, values_T)
    return (sums_S / torch.bincount(sequence_T))[sequence_T]


def reinforce_loss(inputs: LossInputs) -> LossOutputs:
    """-sum w * A * log p (Williams, 1992)."""
    return _unclipped(-(inputs.weights_T * inputs.advantages_T * inputs.logprobs_T).sum(), inputs)


def cross_entropy_loss(inputs: LossInputs) -> LossOutputs:
    """-sum w * log p: maximum likelihood of the tokens, whatever their advantages (supervised fine-tuning)."""
    return _unclipped(-(inputs.weights_T * inputs.logprobs_T).sum(), inputs)


def clipped_policy_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossOutputs:
    """-sum w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A).

    PPO (arXiv 1707.06347); clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). With `dual_clip`, a term of a
    negative A is at least dual_clip * A, so a large r cannot dominate the step (arXiv 1912.09729, equation 5).
    """
    ratio_T = log_ratio(inputs.logprobs_T, inputs.rollout_logprobs_T).exp()
    return _clipped_surrogate(inputs, ratio_T, clip_low, clip_high, dual_clip)


def decoupled_ppo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float, weight_limit: float) -> LossOutputs:
    """-sum w * min(v, weight_limit) * min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A), u = p / p_0, v = p_0 / q.

    p_0 is the policy at the start of the step, q that of the rollout: AReaL (arXiv 2505.24298, equation 5) after
    arXiv 2110.00641. The clip stays around a recent policy, however old the samples are; v corrects for their age, and
    for an engine that computes other probabilities than the trainer. In the first update u = 1, so nothing is clipped.
    """
    proximal_T = proximal_logprobs(inputs)
    age_weights_T = log_ratio(proximal_T, inputs.rollout_logprobs_T).exp().clamp(max=weight_limit)
    ratio_T = log_ratio(inputs.logprobs_T, proximal_T).exp()
    weighted = replace(inputs, weights_T=inputs.weights_T * age_weights_T)
    return _clipped_surrogate(weighted, ratio_T, clip_low, clip_high)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """-sum w * min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s the geometric mean of r over the sequence.

    GSPO (arXiv 2507.18071) in its token form, equations 14 and 15: s = stop_gradient(s) * p / stop_gradient(p).
    """
    log_ratio_T = log_ratio(inputs.logprobs_T.detach(), inputs.rollout_logprobs_T)
    own_T = (inputs.logprobs_T - inputs.logprobs_T.detach()).exp()  # 1, with the gradient of log p
    ratio_T = sequence_means(log_ratio_T, inputs.sequence_T).exp() * own_T
    return _clipped_surrogate(inputs, ratio_T, clip_low, clip_high)


def cispo_loss(inputs: LossInputs, *, clip_high: float) -> LossOutputs:
    """-sum w * stop_gradient(min(r, 1 + clip_high)) * A * log p.

    CISPO (arXiv 2506.13585) in ScaleRL's one-sided form (arXiv 2510.13786): a token beyond the limit keeps a
    gradient, with a bounded weight. It is also AIPO (arXiv 2505.24034) with rho = 1 + clip_high: REINFORCE with
    truncated importance weights.
    """
    ratio_T = log_ratio(inputs.logprobs_T, inputs.rollout_logprobs_T).detach().exp()
    loss = -(inputs.weights_T * ratio_T.clamp(max=1 + clip_high) * inputs.advantages_T * inputs.logprobs_T).sum()
    return LossOutputs(loss, ratio_T > 1 + clip_high)


def dppo_tv_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """-sum w * m * r * A. m is 0 where A > 0 and p - p_rollout > clip_high, or A < 0 and p_rollout - p > clip_low.

    DPPO with the total variation of a token as its limit (arXiv 2602.04879): a difference of probabilities does not
    remove rare tokens, as a limit on their ratio does.
    """
    ratio_T = log_ratio(inputs.logprobs_T, inputs.rollout_logprobs_T).exp()
    difference_T = (inputs.logprobs_T.exp() - inputs.rollout_logprobs_T.exp()).detach()
    is_too_high_T = (inputs.advantages_T > 0) & (difference_T > clip_high)
    is_too_low_T = (inputs.advantages_T < 0) & (difference_T < -clip_low)
    masked_T = is_too_high_T | is_too_low_T
    terms_T = inputs.weights_T * ratio_T * inputs.advantages_T
    return LossOutputs(-terms_T.masked_fill(masked_T, 0).sum(), masked_T)


def sapo_loss(inputs: LossInputs, *, positive_temperature: float, negative_temperature: float) -> LossOutputs:
    """-sum w * A * 4 / tau * sigmoid(tau * (r - 1)), tau by the sign of A.

    SAPO (arXiv 2511.20347): a soft gate takes the place of the clip. Its derivative by r is 1 at r = 1 and falls on
    both sides.
    """
    ratio_T = log_ratio(inputs.logprobs_T, inputs.rollout_logprobs_T).exp()
    tau_T = torch.full_like(ratio_T, negative_temperature)
    tau_T = tau_T.masked_fill(inputs.advantages_T > 0, positive_temperature)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    return _unclipped(-(inputs.weights_T * inputs.advantages_T * gate_T).sum(), inputs)


LOSSES: Mapping[str, Callable[..., LossOutputs]] = {
    "ppo_clip": clipped_policy_loss,
    "decoupled_ppo": decoupled_ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "dppo_tv": dppo_tv_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
    "cross_entropy": cross_entropy_loss,
}
"""By the name in the experiment's `algorithm.loss`. Keyword arguments are keys of `algorithm` of the same name."""


def token_entropy(logprobs_TV: Tensor) -> Tensor:
    """-sum_v p log p of each row of normalised log-probabilities. Shape [T], nats."""
    return -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def _clipped_surrogate(
    inputs: LossInputs, ratio_T: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossOutputs:
    free_T = ratio_T * inputs.advantages_T
    terms_T = torch.minimum(free_T, ratio_T.clamp(1 - clip_low, 1 + clip_high) * inputs.advantages_T)
    if dual_clip is not None:
        floor_T = torch.where(inputs.advantages_T < 0, dual_clip * inputs.advantages_T, -torch.inf)
        terms_T = torch.maximum(terms_T, floor_T)
    return LossOutputs(-(inputs.weights_T * terms_T).sum(), (terms_T != free_T).detach())


def _unclipped(loss: Tensor, inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss, torch.zeros_like(inputs.logprobs_T, dtype=torch.bool))
