"""Penalties on the rewards of samples, before advantages are computed from them.

Suffix: _S samples of the batch.
"""

import numpy as np
from numpy.typing import NDArray

from nexrl.algorithm import Batch, ForwardPass, Sample
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.overlong_penalty import OverlongPenaltySpec


def shaped_rewards(batch: Batch, algorithm: AlgorithmSpec, reference: ForwardPass) -> NDArray[np.float64]:
    """Return the rewards less the penalties of `algorithm`, float64, shape [S].

    `reference` computes log-probabilities under the initial model. It is called only for a KL penalty.
    """
    rewards_S = batch.rewards_B
    if algorithm.overlong_penalty:
        rewards_S = rewards_S - overlong_penalties(batch, algorithm.overlong_penalty)
    if algorithm.kl_reward_coefficient:
        rewards_S = rewards_S - algorithm.kl_reward_coefficient * kl_sums(batch, reference)
    return rewards_S


def overlong_penalties(batch: Batch, limits: OverlongPenaltySpec) -> NDArray[np.float64]:
    """0 up to `after_tokens` generated tokens, then on a line to `penalty` at `full_tokens`. Shape [S].

    DAPO (arXiv 2503.14476), equation 13.
    """
    tokens_S = np.array([sum(int(each.loss_mask.sum()) for each in sample.trajectories) for sample in batch.samples])
    share_S = (tokens_S - limits.after_tokens) / (limits.full_tokens - limits.after_tokens)
    return limits.penalty * share_S.clip(0, 1)


def kl_sums(batch: Batch, reference: ForwardPass) -> NDArray[np.float64]:
    """Sum of log p_rollout - log p_reference over the generated tokens of each sample (k1). Shape [S].

    k1 is unbiased for KL(rollout || reference). Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    trajectories = [each for sample in batch.samples for each in sample.trajectories]
    reference_logprobs = iter(reference([each.sequence(0.0) for each in trajectories]))

    def kl(sample: Sample) -> float:
        return sum(
            float((each.rollout_logprobs - next(reference_logprobs))[each.loss_mask].sum())
            for each in sample.trajectories
        )

    return np.array([kl(sample) for sample in batch.samples])
