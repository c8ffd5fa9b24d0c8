"""From logits to tokens, for rows with different sampling settings. Shapes: B rows, V vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nexrl.errors import NexrlError
from nexrl.truncation import kept_tokens

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplingBatch:
    """Settings of each row, and the random number that decides its next token.

    `temperature_B` f32 (0 = greedy), `top_p_B` f32 in (0, 1], `top_k_B` i64 (0 = all), `uniforms_B` f64 in [0, 1).
    """

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    uniforms_B: Tensor


def sample_tokens(logits_BV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Token ids (i64) and their log-probabilities (f32) under the distribution they were drawn from.

    Raises NexrlError if the logits are not finite: the weights have diverged.
    """
    logprobs_BV = sampled_logprobs(logits_BV, batch)
    # One uniform per token, through the inverse of the cumulative distribution: what a row draws depends on its own
    # random numbers only, not on its neighbours in the batch. In float64, because f32 sums lose the tail.
    cumulative_BV = logprobs_BV.double().exp_().cumsum(-1)
    total_B = cumulative_BV[:, -1]
    if not torch.isfinite(total_B).all():
        raise NexrlError("the model's logits are not finite")
    # Strictly below the total, so that the search cannot end on a token of probability zero.
    threshold_B = torch.minimum(batch.uniforms_B * total_B, total_B.nextafter(torch.zeros_like(total_B)))
    drawn_B = torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True)[:, 0]
    tokens_B = torch.where(batch.temperature_B == 0, logits_BV.argmax(-1), drawn_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def uniforms(seeds: Sequence[int], draws: Sequence[int]) -> NDArray[np.float64]:
    """Random number `draws[b]` (from 0) of seed `seeds[b]`, in [0, 1). [B]

    SplitMix64 (Steele, Lea, Flood, 2014), which computes any number of a seed directly. A stateful generator for each
    row would have to move with its row, and be restored for a completion that continues.
    """
    start_B = _mixed(np.array(seeds, dtype=np.uint64) + _STEP)  # mixed twice, so that seeds 0, 1, 2 are far apart
    states_B = start_B + _STEP * (np.array(draws, dtype=np.uint64) + np.uint64(1))
    numbers_B = (_mixed(states_B) >> np.uint64(11)).astype(np.float64)
    numbers_B *= 2.0**-53
    return numbers_B


def _mixed(states_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    states_B = (states_B ^ (states_B >> np.uint64(30))) * _FACTORS[0]
    states_B = (states_B ^ (states_B >> np.uint64(27))) * _FACTORS[1]
    return states_B ^ (states_B >> np.uint64(31))


def sampled_logprobs(logits_BV: Tensor, batch: SamplingBatch) -> Tensor:
    """log p(token) after temperature, then top-k, then top-p, renormalised; greedy rows: the raw log-softmax. [B, V]"""
    is_greedy_B = batch.temperature_B == 0
    scaled_BV = logits_BV.float() / torch.where(is_greedy_B, 1.0, batch.temperature_B)[:, None]
    is_truncated_B = ~is_greedy_B & ((batch.top_p_B < 1) | (batch.top_k_B > 0))
    rows_R = is_truncated_B.nonzero()[:, 0]
    if len(rows_R) > 0:
        is_kept_RV = kept_tokens(scaled_BV[rows_R], batch.top_p_B[rows_R], batch.top_k_B[rows_R])
        scaled_BV[rows_R] = scaled_BV[rows_R].masked_fill(~is_kept_RV, -torch.inf)
    return scaled_BV.log_softmax(-1)
