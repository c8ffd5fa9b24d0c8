"""Leaves out of the loss what is too far off-policy: because the engine computes other probabilities than the trainer,
or because a sample is of an old policy.

Suffixes: _T trained tokens, flat, _S sequences. r = p / p_rollout is the ratio of a token; see `losses`. With
decoupled PPO, p is the policy at the start of the step: what later updates change, the clip of the loss limits.
"""

import torch
from torch import Tensor

from nexrl.algorithm import LossInputs
from nexrl.spec.correction import CorrectionSpec, RatioBand
from nexrl_trainer.losses import log_ratio, proximal_logprobs, sequence_means


def left_out(inputs: LossInputs, correction: CorrectionSpec) -> Tensor | None:
    """Return which tokens to leave out (bool, shape [T]); None without a rule.

    Sources: `token_band` IcePop (arXiv 2510.18855), `negative_drift` off-policy sequence masking (DeepSeek-V3.2, arXiv
    2512.02556). The band of geometric means and the veto are verl's rollout correction. Nothing has a gradient.
    """
    if correction == CorrectionSpec():
        return None
    log_ratio_T = log_ratio(proximal_logprobs(inputs), inputs.rollout_logprobs_T)
    left_out_T = torch.zeros_like(log_ratio_T, dtype=torch.bool)
    if correction.token_band:
        left_out_T |= _is_outside(log_ratio_T, correction.token_band)
    if correction.sequence_band:
        left_out_T |= _is_outside(sequence_means(log_ratio_T, inputs.sequence_T), correction.sequence_band)
    if correction.veto_ratio:
        vetoes_T = (log_ratio_T.exp() < correction.veto_ratio).to(log_ratio_T.dtype)
        left_out_T |= sequence_means(vetoes_T, inputs.sequence_T) > 0
    if correction.negative_drift is not None:
        drift_T = -sequence_means(log_ratio_T, inputs.sequence_T)
        left_out_T |= (inputs.advantages_T < 0) & (drift_T > correction.negative_drift)
    return left_out_T


def _is_outside(log_ratio_T: Tensor, band: RatioBand) -> Tensor:
    ratio_T = log_ratio_T.exp()
    return (ratio_T < band.low) | (ratio_T > band.high)
