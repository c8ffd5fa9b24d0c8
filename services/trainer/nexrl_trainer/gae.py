"""Generalized advantage estimation: advantages and returns of tokens, from rewards of tokens and the critic's values.

Suffixes: _N tokens of a train batch, _B its sequences, _P its trained tokens, _T the trained tokens of one sample.
A step of an episode is a trained token. Context tokens, such as the results of tools, are no steps: nobody chose them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexrl.algorithm import Batch, PreparedBatch
from nexrl.errors import InvalidArgumentError
from nexrl.spec.critic import Ppo
from nexrl.train_batch import TrainBatch
from nexrl_trainer.token_advantages import token_rewards

REWARDS, SAMPLE = "rewards", "sample"
"""Columns that the algorithm processor adds: float32 [N], the reward of each trained token; int64 [B], the number of
the sample that a sequence belongs to."""
VALUES, RETURNS = "values", "returns"
"""Columns that `with_advantages` adds, float32 [N]: the critic's values at the start of the step, and its targets."""

_STD_FLOOR = 1e-4  # as in `advantages.py`

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ValueFigures:
    """How well the values at the start of a step foretold its returns, over trained tokens.

    `explained_variance` is 1 - var(return - value) / var(return), 0 if all returns are equal.
    """

    return_mean: float
    value_mean: float
    explained_variance: float


def rewarded(
    batch: Batch, rewards_S: Floats, dropped_S: NDArray[np.bool_], metrics: Mapping[str, float]
) -> PreparedBatch:
    """Return the samples that are not dropped, with the columns that `with_advantages` needs.

    `rewards_S` are the rewards of the samples less their penalties.

    The reward of a context token, and of those after it, belongs to the trained token before it, which led to it. What
    comes before the first trained token of a sample belongs to nobody's choice, so it is left out.
    """
    sequences = []
    for number, (sample, reward) in enumerate(zip(batch.samples, rewards_S, strict=True)):
        if dropped_S[number]:
            continue
        rewards_N = token_rewards(sample, float(reward))
        mask_N = np.concatenate([each.loss_mask for each in sample.trajectories])
        own_N = _moved_to_choices(rewards_N, mask_N).astype(np.float32)
        ends = np.cumsum([len(each.token_ids) for each in sample.trajectories])[:-1]
        for trajectory, part in zip(sample.trajectories, np.split(own_N, ends), strict=True):
            sequences.append(trajectory.sequence(0.0, {REWARDS: part, SAMPLE: np.array(number)}))
    return PreparedBatch(sequences, metrics)


def check_rewards(batch: TrainBatch) -> None:
    """Raise InvalidArgumentError unless the batch has the columns of `rewarded`."""
    if not batch.token_count:
        return
    rewards_N, sample_B = batch.columns.get(REWARDS), batch.columns.get(SAMPLE)
    if rewards_N is None or rewards_N.shape != batch.token_ids_N.shape or not np.isfinite(rewards_N).all():
        raise InvalidArgumentError(
            f"train batch: columns[{REWARDS}]: algorithm.type ppo needs the reward of each token, a finite number"
        )
    if sample_B is None or sample_B.shape != batch.lengths_B.shape or sample_B.dtype.kind != "i":
        raise InvalidArgumentError(
            f"train batch: columns[{SAMPLE}]: algorithm.type ppo needs an integer for each sequence: the number of its "
            "sample, equal for all sequences of one"
        )


def with_advantages(
    batch: TrainBatch, values_N: NDArray[np.float32], algorithm: Ppo
) -> tuple[TrainBatch, ValueFigures | None]:
    """Return the batch with advantages, values and returns; and figures, None without a trained token.

    `values_N`: the critic's value of the context of each trained token, 0 elsewhere. Advantages are whitened over all
    trained tokens of the batch: (A - mean) / (std + 1e-4).
    """
    if not batch.token_count:
        return batch, None
    trained_P = np.flatnonzero(batch.loss_mask_N)
    sample_P = batch.columns[SAMPLE][batch.sequence_of_tokens[trained_P]]
    values_P = values_N[trained_P].astype(np.float64)
    rewards_P = batch.columns[REWARDS][trained_P].astype(np.float64)
    advantages_P = np.zeros_like(values_P)
    for number in np.unique(sample_P):
        own = sample_P == number
        advantages_P[own] = gae(rewards_P[own], values_P[own], algorithm.discount, algorithm.gae_lambda)
    returns_P = advantages_P + values_P
    whitened_P = (advantages_P - advantages_P.mean()) / (advantages_P.std() + _STD_FLOOR)
    columns = {VALUES: _spread(batch, trained_P, values_P), RETURNS: _spread(batch, trained_P, returns_P)}
    changed = replace(batch, advantages_N=_spread(batch, trained_P, whitened_P), columns={**batch.columns, **columns})
    spread = float(returns_P.var())
    explained = 1 - float((returns_P - values_P).var()) / spread if spread > 0 else 0.0
    return changed, ValueFigures(float(returns_P.mean()), float(values_P.mean()), explained)


def gae(rewards_T: Floats, values_T: Floats, discount: float, gae_lambda: float) -> Floats:
    """Sum over l of (discount * gae_lambda)^l * (r_{t+l} + discount * V_{t+l+1} - V_{t+l}); the last V is 0.

    Source: arXiv 1506.02438, equation 16. The end of a sample that was cut at a limit counts as an end, as in TRL and
    verl.
    """
    differences_T = rewards_T + discount * np.append(values_T[1:], 0.0) - values_T
    advantages_T = np.zeros_like(differences_T)
    later = 0.0
    for at in range(len(differences_T) - 1, -1, -1):
        advantages_T[at] = later = differences_T[at] + discount * gae_lambda * later
    return advantages_T


def _moved_to_choices(rewards_N: Floats, mask_N: NDArray[np.bool_]) -> Floats:
    choice_N = np.cumsum(mask_N) - 1  # the trained token that each token follows, or is; -1 before the first
    trained = np.flatnonzero(mask_N)
    kept = choice_N >= 0
    moved_N = np.zeros_like(rewards_N)
    moved_N[trained] = np.bincount(choice_N[kept], weights=rewards_N[kept], minlength=len(trained))
    return moved_N


def _spread(batch: TrainBatch, trained_P: NDArray[np.int64], values_P: NDArray[Any]) -> NDArray[np.float32]:
    spread_N = np.zeros(len(batch.token_ids_N), np.float32)
    spread_N[trained_P] = values_P
    return spread_N
