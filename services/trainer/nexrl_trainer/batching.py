"""Weights of the tokens of a train batch in its loss.

Suffixes: _N tokens of the batch, end to end; _B sequences.
"""

import numpy as np
from numpy.typing import NDArray

from nexrl.train_batch import TrainBatch


def token_weights(
    batch: TrainBatch,
    aggregation: str,
    denominator: int | None = None,
    *,
    constant_tokens: int | None = None,
) -> NDArray[np.float32]:
    """Return the weight of each token in the loss, the entropy bonus and the KL penalty; 0 outside the mask. Shape [N].

    "token": the mean over all trained tokens (DAPO, arXiv 2503.14476). "sequence": over sequences, of each one's token
    mean (GRPO, arXiv 2402.03300). "constant": over sequences, of each one's token sum divided by `constant_tokens`
    (Dr.GRPO, arXiv 2503.20783). Only sequences with a trained token count.

    `denominator`: trained tokens ("token"), or sequences with such, of the WHOLE step if the batch is only a part of
    it; by default what the batch has.
    """
    sequence_N = batch.sequence_of_tokens
    trained_B = np.bincount(sequence_N, weights=batch.loss_mask_N, minlength=len(batch.lengths_B))
    sequences = max(denominator or int((trained_B > 0).sum()), 1)
    match aggregation:
        case "token":
            total = denominator or int(trained_B.sum())
            weights_N = batch.loss_mask_N / max(total, 1)
        case "sequence":
            weights_N = batch.loss_mask_N / (sequences * np.maximum(trained_B, 1)[sequence_N])
        case "constant":
            weights_N = batch.loss_mask_N / (sequences * (constant_tokens or 1))
    return weights_N.astype(np.float32)
