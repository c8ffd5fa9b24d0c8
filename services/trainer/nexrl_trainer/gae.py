"""Generalized advantage estimation: advantages and returns of tokens, from rewards of tokens and the critic's values.

Suffixes: _N tokens of a train batch, _P its trained tokens, _S samples of the batch, _T the tokens of one sample.
A step of an episode is a trained token. Context tokens, such as the results of tools, are no steps: the policy did not
choose them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nexrl.algorithm import Batch, PreparedBatch
from nexrl.critic_columns import RETURNS, REWARDS, SAMPLE, VALUES
from nexrl.errors import InvalidArgumentError
from nexrl.spec.critic import Ppo
from nexrl.train_batch import TrainBatch
from nexrl_trainer.advantages import group_standardized_advantages
from nexrl_trainer.token_advantages import Floats, token_rewards


@dataclass(frozen=True)
class ValueFigures:
    """How well the values at the start of a step predicted its returns, over trained tokens.

    `explained_variance` is 1 - var(return - value) / var(return), 0 if all returns are equal.
    """

    return_mean: float
    value_mean: float
    explained_variance: float


def rewarded(
    batch: Batch, rewards_S: Floats, dropped_S: NDArray[np.bool_], metrics: Mapping[str, float]
) -> PreparedBatch:
    """Return the samples that are not dropped, with the columns that `with_advantages` needs.

    `rewards_S` are the rewards of the samples less their penalties. Raises InvalidArgumentError if a trajectory has a
    column of one of these names.
    """
    sequences = []
    for number, (sample, reward) in enumerate(zip(batch.samples, rewards_S, strict=True)):
        if dropped_S[number]:
            continue
        rewards_T = token_rewards(sample, float(reward)).astype(np.float32)
        ends = np.cumsum([len(each.token_ids) for each in sample.trajectories])[:-1]
        for trajectory, part in zip(sample.trajectories, np.split(rewards_T, ends), strict=True):
            if taken := trajectory.columns.keys() & {REWARDS, SAMPLE}:
                raise InvalidArgumentError(
                    f"columns[{min(taken)}] of sample {sample.sample_id}: algorithm.type ppo has a column of this "
                    "name; give yours another name"
                )
            sequences.append(trajectory.sequence(0.0, {REWARDS: part, SAMPLE: np.array(number)}))
    return PreparedBatch(sequences, metrics)


def with_advantages(
    batch: TrainBatch, values_N: NDArray[np.float32], algorithm: Ppo
) -> tuple[TrainBatch, ValueFigures | None]:
    """Return the batch with advantages, values and returns; and figures, None without a trained token.

    `values_N`: the critic's value of the context of each trained token, 0 elsewhere. The sequences of a sample are
    taken end to end. The reward of a context token belongs to the trained token before it, which led to it; one before
    the first trained token to none. Advantages are standardised over all trained tokens of the batch.
    """
    if not batch.token_count:
        return batch, None
    mask_N, rewards_N = batch.loss_mask_N, batch.columns[REWARDS].astype(np.float64)
    sample_N = batch.columns[SAMPLE][batch.sequence_of_tokens]
    by_sample_N = np.argsort(sample_N, kind="stable")
    advantages_N = np.zeros(len(mask_N))
    for tokens_T in np.split(by_sample_N, np.flatnonzero(np.diff(sample_N[by_sample_N])) + 1):
        mask_T = mask_N[tokens_T]
        trained = tokens_T[mask_T]
        rewards = _rewards_of_trained(rewards_N[tokens_T], mask_T)
        advantages_N[trained] = gae(rewards, values_N[trained], algorithm.discount, algorithm.gae_lambda)
    returns_N = advantages_N + values_N
    scaled_N = np.zeros(len(mask_N), np.float32)
    scaled_N[mask_N] = group_standardized_advantages(advantages_N[mask_N], np.zeros(batch.token_count, np.int64))
    columns = {VALUES: values_N, RETURNS: returns_N.astype(np.float32)}
    changed = replace(batch, advantages_N=scaled_N, columns={**batch.columns, **columns})
    returns_P, values_P = returns_N[mask_N], values_N[mask_N]
    spread = float(returns_P.var())
    explained = 1 - float((returns_P - values_P).var()) / spread if spread > 0 else 0.0
    return changed, ValueFigures(float(returns_P.mean()), float(values_P.mean()), explained)


def gae(rewards: Floats, values: NDArray[np.floating], discount: float, gae_lambda: float) -> Floats:
    """Sum over l of (discount * gae_lambda)^l * (r_{t+l} + discount * V_{t+l+1} - V_{t+l}); the last V is 0.

    One entry for each trained token of a sample. Source: arXiv 1506.02438, equation 16. The end of a sample that was
    cut at a limit counts as an end, as in TRL and verl.
    """
    differences = rewards + discount * np.append(values[1:], 0.0) - values
    advantages, later = [], 0.0
    for difference in reversed(differences.tolist()):
        later = difference + discount * gae_lambda * later
        advantages.append(later)
    return np.array(advantages[::-1])


def _rewards_of_trained(rewards_T: Floats, mask_T: NDArray[np.bool_]) -> Floats:
    """Return the reward of each trained token, with that of the context tokens after it."""
    before_T = np.cumsum(mask_T) - 1  # the trained token that each token is, or follows; -1 before the first
    kept = before_T >= 0
    return np.bincount(before_T[kept], weights=rewards_T[kept], minlength=int(mask_T.sum())).astype(np.float64)
