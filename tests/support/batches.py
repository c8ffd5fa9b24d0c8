"""Train batches, and parts of them."""

import numpy as np
from numpy.typing import NDArray

from nexrl.train_batch import TrainBatch, TrainSequence
from tests.support.families import VOCABULARY_SIZE

_CONTEXT = 20  # longer than the sliding windows of the tiny models


def select(batch: TrainBatch, rows_B: NDArray[np.bool_]) -> TrainBatch:
    """Return the batch without the sequences whose entry is False."""
    kept_N = np.repeat(rows_B, batch.lengths_B)
    reference_N = batch.reference_logprobs_N
    return TrainBatch(
        token_ids_N=batch.token_ids_N[kept_N],
        loss_mask_N=batch.loss_mask_N[kept_N],
        rollout_logprobs_N=batch.rollout_logprobs_N[kept_N],
        advantages_N=batch.advantages_N[kept_N],
        lengths_B=batch.lengths_B[rows_B],
        reference_logprobs_N=None if reference_N is None else reference_N[kept_N],
        columns={
            name: column[kept_N if len(column) == len(kept_N) else rows_B] for name, column in batch.columns.items()
        },
    )


def group_of_samples(seed: int) -> TrainBatch:
    """Return four samples of one task, of different lengths, for the tiny models."""
    random = np.random.default_rng(seed)
    context = random.integers(3, VOCABULARY_SIZE, _CONTEXT)
    sequences = []
    for own in (3, 8, 1, 5):
        ids = np.concatenate([context, random.integers(3, VOCABULARY_SIZE, own)])
        mask = np.arange(len(ids)) >= _CONTEXT
        recorded = -4 - 0.2 * random.random((2, len(ids)))
        sequences.append(TrainSequence(ids, mask, recorded[0], float(random.normal()), recorded[1]))
    return TrainBatch.pack(sequences)
