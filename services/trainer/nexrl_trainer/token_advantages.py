"""Advantages of single tokens, from rewards that belong to tokens or turns.

Suffixes: _T tokens of one sample, its trajectories end to end; _S samples of the batch; _K turns of one sample.
A turn is a run of generated tokens, with the context tokens up to the next one.

A sample has its trajectories in the order in which they began, so a reward of a later trajectory counts for the tokens
of the earlier ones.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nexrl.algorithm import Batch, Sample
from nexrl.columns import TOKEN_REWARDS
from nexrl.spec.algorithm import Grpo
from nexrl_trainer.advantages import IntArray, group_standardized_advantages

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def token_rewards(sample: Sample, reward: float) -> Floats:
    """Return the reward of each token of the sample; they add up to `reward`. Shape [T].

    What the column `token_rewards` leaves of `reward` is the reward of the last generated token: the reward of a sample
    without the column, and penalties.
    """
    rewards_T = np.concatenate(
        [
            np.asarray(each.columns.get(TOKEN_REWARDS, np.zeros(len(each.token_ids))), np.float64)
            for each in sample.trajectories
        ]
    )
    rewards_T[np.flatnonzero(_loss_mask(sample))[-1]] += reward - rewards_T.sum()
    return rewards_T


def returns_to_go(rewards_T: Floats, loss_mask_T: Bools, discount: float) -> Floats:
    """Sum of the rewards from a token on, each times `discount` for each generated token in between. Shape [T].

    Context tokens are skipped: they discount nothing. Entries of context tokens have no meaning.
    """
    steps_T = np.cumsum(loss_mask_T)
    returns_T = np.zeros_like(rewards_T)
    later, end = 0.0, len(rewards_T) - 1  # the return at `end`, the position of the next reward
    for before, at in reversed(list(pairwise([-1, *np.flatnonzero(rewards_T)]))):
        later = rewards_T[at] + discount ** float(steps_T[end] - steps_T[at]) * later
        end = at
        stretch = slice(before + 1, at + 1)  # tokens from which no reward comes earlier than the one at `at`
        returns_T[stretch] = later * discount ** (steps_T[at] - steps_T[stretch]).astype(float)
    return returns_T


def return_to_go_advantages(
    rewards: Sequence[Floats], masks: Sequence[Bools], groups_S: IntArray, *, discount: float = 1.0
) -> list[NDArray[np.float32]]:
    """(return to go - mean) / (std + 1e-4) over generated tokens. For each sample, one value per generated token.

    REINFORCE++ (arXiv 2501.03262): one group is the whole batch.
    """
    returns = [returns_to_go(r_T, mask_T, discount)[mask_T] for r_T, mask_T in zip(rewards, masks, strict=True)]
    return _standardized(returns, groups_S)


def turn_advantages(rewards: Sequence[Floats], masks: Sequence[Bools], groups_S: IntArray) -> list[NDArray[np.float32]]:
    """Sum of the normalised rewards of a token's turn and of later turns. For each sample, one per generated token.

    GRPO with process supervision (arXiv 2402.03300, section 4.1.3), whose steps are turns here: the reward of a turn
    is normalised as (reward - mean) / (std + 1e-4), over the turns of all samples of the group.
    """
    turns = [_turns(mask_T) for mask_T in masks]
    sums = [np.bincount(turn_T, weights=r_T).astype(np.float64) for turn_T, r_T in zip(turns, rewards, strict=True)]
    return [
        scaled_K[::-1].cumsum()[::-1][turn_T[mask_T]]
        for scaled_K, turn_T, mask_T in zip(_standardized(sums, groups_S), turns, masks, strict=True)
    ]


TOKEN_ADVANTAGES: Mapping[str, Callable[..., list[NDArray[np.float32]]]] = {
    "return_to_go": return_to_go_advantages,
    "turn_mean_std": turn_advantages,
}
"""By the name in the experiment's `algorithm.advantage`."""


def token_advantages(batch: Batch, rewards_S: Floats, groups_S: IntArray, algorithm: Grpo) -> list[NDArray[np.float32]]:
    """Return for each sample the advantages of its generated tokens, its trajectories end to end.

    `rewards_S` are the rewards of the samples less their penalties. Samples with equal `groups_S` are compared.
    """
    masks = [_loss_mask(sample) for sample in batch.samples]
    rewards = [token_rewards(sample, reward) for sample, reward in zip(batch.samples, rewards_S, strict=True)]
    name = algorithm.advantage
    keywords = {"discount": algorithm.discount} if name == "return_to_go" else {}
    return TOKEN_ADVANTAGES[name](rewards, masks, groups_S, **keywords)


def zero_token_variance(batch: Batch, groups_S: IntArray, algorithm: Grpo) -> Bools:
    """True for each sample of a group in which, without penalties, every token has advantage 0. Shape [S]."""
    advantages = token_advantages(batch, batch.rewards_B, groups_S, algorithm)
    differing_S = np.array([bool(each.any()) for each in advantages])
    return ~np.isin(groups_S, groups_S[differing_S])


def _loss_mask(sample: Sample) -> Bools:
    return np.concatenate([each.loss_mask for each in sample.trajectories])


def _turns(mask_T: Bools) -> NDArray[np.int64]:
    """Return the turn of each token, from 0; context before the first turn is part of it. Shape [T]."""
    is_start_T = mask_T & ~np.concatenate([[False], mask_T[:-1]])
    return (np.cumsum(is_start_T) - 1).clip(min=0)


def _standardized(values: Sequence[Floats], groups_S: IntArray) -> list[NDArray[np.float32]]:
    """(value - mean) / (std + 1e-4), over all values of the samples of a group. The arrays keep their lengths."""
    lengths_S = [len(each) for each in values]
    scaled = group_standardized_advantages(np.concatenate(values), np.repeat(groups_S, lengths_S))
    return np.split(scaled, np.cumsum(lengths_S)[:-1])
