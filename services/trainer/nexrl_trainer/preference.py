"""Preference losses: they compare a better with a worse sample of the same group, which form a pair.

Suffixes: _S samples of the batch, _P pairs, _B sequences, _N tokens of a train batch, _T trained tokens of one call.

The sequences of a pair have the same number in the column `pair`, which is negative for those of the worse sample. The
loss of a pair depends on the log-probabilities of both, which may be in different micro-batches, or on different ranks.
So it is computed in two passes: a forward pass over the whole batch gives the loss of each pair and its derivative, and
the second pass, with gradients, is a sum over tokens. The gradient is exact, and does not depend on the split.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nexrl.algorithm import Batch, LossInputs, LossOutputs, PreparedBatch
from nexrl.errors import InvalidArgumentError
from nexrl.spec.algorithm import Dpo
from nexrl.train_batch import TrainBatch

PAIR = "pair"
"""Column of a train batch, int64 [B]."""
_LOSS, _SLOPE = "preference_loss", "preference_slope"
"""Columns that `with_preferences` adds, float32 [N]: the token's share of the loss, and its derivative by log p."""


def preference_pairs(
    rewards_S: NDArray[np.float64], groups_S: NDArray[np.integer[Any]], kept_S: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the pair of each sample, negative for the worse one; 0 for a sample in no pair.

    In each group the best is paired with the worst, the second best with the second worst, and so on, as long as their
    rewards differ. Equal rewards are ordered as in the batch. A sample is in at most one pair, and only if it is kept.
    """
    pairs_S = np.zeros(len(rewards_S), np.int64)
    number = 0
    for group in np.unique(groups_S):
        members = np.flatnonzero((groups_S == group) & kept_S)
        best_first = members[np.argsort(-rewards_S[members], kind="stable")].tolist()
        for better, worse in zip(best_first, reversed(best_first), strict=True):
            if rewards_S[better] <= rewards_S[worse]:
                break
            number += 1
            pairs_S[[better, worse]] = number, -number
    return pairs_S


def paired(batch: Batch, pairs_S: NDArray[np.int64], metrics: Mapping[str, float]) -> PreparedBatch:
    """Return the samples that are in a pair. Metric: `preference_pairs`, their number.

    All trajectories of a sample have its pair: their tokens count together. The advantage, 1 or -1, is for metrics.
    """
    sequences = [
        trajectory.sequence(float(np.sign(pair)), {PAIR: pair})
        for sample, pair in zip(batch.samples, pairs_S, strict=True)
        if pair
        for trajectory in sample.trajectories
    ]
    return PreparedBatch(sequences, {**metrics, "preference_pairs": float(pairs_S.max(initial=0))})


def check_pairs(batch: TrainBatch) -> None:
    """Raise InvalidArgumentError unless each sequence is in a pair, and each pair has a better and a worse side."""
    pair_B = batch.columns.get(PAIR)
    if not batch.token_count:
        return
    if pair_B is None or pair_B.shape != batch.lengths_B.shape or pair_B.dtype.kind != "i" or not pair_B.all():
        raise InvalidArgumentError(
            f"train batch: columns[{PAIR}]: loss dpo needs an integer for each sequence: the number of its pair, from "
            "1, negative for the worse sample"
        )
    if alone := set(np.setxor1d(pair_B[pair_B > 0], -pair_B[pair_B < 0]).tolist()):
        raise InvalidArgumentError(
            f"train batch: columns[{PAIR}]: pair {min(alone)} has only one side; both must be in the batch"
        )


def with_preferences(batch: TrainBatch, logprobs_N: NDArray[np.float32], algorithm: Dpo) -> TrainBatch:
    """Add what `preference_loss` needs to a batch that `check_pairs` accepts. `logprobs_N`: log p now, 0 elsewhere."""
    if not batch.token_count:
        return batch
    assert batch.reference_logprobs_N is not None
    pair_B, sequence_N, mask_N = batch.columns[PAIR], batch.sequence_of_tokens, batch.loss_mask_N
    numbers, pair_of_B = np.unique(np.abs(pair_B), return_inverse=True)
    sign_N, pair_N = np.sign(pair_B)[sequence_N], pair_of_B[sequence_N]
    log_ratio_N = np.where(mask_N, logprobs_N.astype(np.float64) - batch.reference_logprobs_N, 0)
    margin_P = np.bincount(pair_N, weights=sign_N * log_ratio_N).astype(np.float64)
    loss_P, slope_P = dpo(margin_P, algorithm.beta, algorithm.label_smoothing)
    tokens_P = np.bincount(pair_N, weights=mask_N)
    loss_N = mask_N * (loss_P / np.maximum(tokens_P, 1))[pair_N] / len(numbers)
    slope_N = mask_N * sign_N * slope_P[pair_N] / len(numbers)
    added = {_LOSS: loss_N.astype(np.float32), _SLOPE: slope_N.astype(np.float32)}
    return replace(batch, columns={**batch.columns, **added})


def dpo(
    margin_P: NDArray[np.float64], beta: float, label_smoothing: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return loss and derivative by the margin of each pair. Shapes [P].

    -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), with the margin m the log ratio of policy and reference of
    the better sample minus that of the worse, e the label smoothing. DPO (arXiv 2305.18290, equation 7); e > 0 is
    conservative DPO (E. Mitchell, "A note on DPO with noisy preferences", 2023).
    """
    wrong_P, right_P = np.logaddexp(0, -beta * margin_P), np.logaddexp(0, beta * margin_P)  # -log sigmoid(+-beta m)
    loss_P = (1 - label_smoothing) * wrong_P + label_smoothing * right_P
    slope_P = beta * (label_smoothing * np.exp(-wrong_P) - (1 - label_smoothing) * np.exp(-right_P))
    return loss_P, slope_P


def preference_loss(inputs: LossInputs) -> LossOutputs:
    """Mean loss over the pairs of the step; its gradient by log p of a token is the slope of the pair, with its sign.

    The weights of the tokens are not used: a pair is a sum over its tokens.
    """
    own_T = inputs.logprobs_T - inputs.logprobs_T.detach()  # 0, with the gradient of log p
    loss = (inputs.columns[_LOSS] + inputs.columns[_SLOPE] * own_T).sum()
    return LossOutputs(loss, torch.zeros_like(inputs.logprobs_T, dtype=torch.bool))


PREFERENCE_LOSSES: Mapping[str, Callable[..., LossOutputs]] = {"dpo": preference_loss}
"""By the name in the experiment's `algorithm.loss`."""
