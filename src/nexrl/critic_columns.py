"""The columns of a train batch with which a critic learns (`algorithm.type: ppo`).

Suffixes: _N tokens of a train batch, _B its sequences.
"""

import numpy as np

from nexrl.errors import InvalidArgumentError, Violation
from nexrl.train_batch import TrainBatch

REWARDS, SAMPLE = "rewards", "sample"
"""Columns that a processor adds: the reward of each token, float32 [N]; the number of the sample that a sequence
belongs to, int64 [B]."""
VALUES, RETURNS = "values", "returns"
"""Columns that the step adds, float32 [N]: the critic's values at its start, and what the critic learns."""


def critic_violation(batch: TrainBatch) -> Violation | None:
    """Return what is wrong with the columns of a batch that a processor has made, or None."""
    for name in (VALUES, RETURNS):
        if name in batch.columns:
            return Violation(f"columns[{name}]", "algorithm.type ppo computes it; give your column another name")
    if not batch.token_count:
        return None
    rewards_N, sample_B = batch.columns.get(REWARDS), batch.columns.get(SAMPLE)
    if rewards_N is None or rewards_N.shape != batch.token_ids_N.shape or not np.isfinite(rewards_N).all():
        return Violation(f"columns[{REWARDS}]", "algorithm.type ppo needs the reward of each token, a finite number")
    if sample_B is None or sample_B.shape != batch.lengths_B.shape or sample_B.dtype.kind != "i":
        return Violation(
            f"columns[{SAMPLE}]",
            "algorithm.type ppo needs an integer for each sequence: the number of its sample, equal for all sequences "
            "of one",
        )
    return None


def check_critic_columns(batch: TrainBatch) -> None:
    """Raise InvalidArgumentError for what `critic_violation` returns."""
    if violation := critic_violation(batch):
        raise InvalidArgumentError(f"train batch: {violation}", violations=[violation])
