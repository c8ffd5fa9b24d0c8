"""Train batches."""

import numpy as np

from nexrl.train_batch import TrainBatch, TrainSequence
from tests.support.families import VOCABULARY_SIZE

_CONTEXT = 20  # longer than the sliding windows of the tiny models


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
