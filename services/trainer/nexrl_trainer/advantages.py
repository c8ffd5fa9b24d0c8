"""Advantages: how much better a sample did than the samples it is compared with.

Pure functions of NumPy arrays. Suffixes: _B samples in the batch, _G groups.
Every function takes `rewards_B` (float) and `groups_B` (int, any labels; equal label = same group, groups may differ in
size and be in any order) and returns float32 `advantages_B`. A group whose rewards are all equal gets exactly 0.
Advantages that compare the whole batch get one group with all samples (`compared_groups`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexrl.algorithm import Advantage
from nexrl.code_reference import USER_CODE_ERRORS, load_reference
from nexrl.errors import InvalidArgumentError, TrainingFailedError
from nexrl.exception_text import exception_text
from nexrl.spec.advantages import BATCH_BASELINES, DISTILLATION
from nexrl.spec.algorithm import AlgorithmSpec, Grpo
from nexrl_trainer.best_of_k import best_of_k_differences

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]

_STD_FLOOR = 1e-4  # as in TRL and verl: keeps the advantage finite when a group's rewards barely differ


def group_mean_advantages(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float32]:
    """Reward minus the mean of its group: Dr.GRPO (arXiv 2503.20783), without GRPO's bias to easy and hard tasks."""
    return _centred(rewards_B, groups_B).astype(np.float32)


def group_standardized_advantages(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float32]:
    """(reward - mean) / (std + 1e-4) per group: GRPO (arXiv 2402.03300), with the sample (n - 1) standard deviation."""
    return _scaled(_centred(rewards_B, groups_B), groups_B)


def leave_one_out_advantages(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float32]:
    """Reward minus the mean of the OTHER samples of its group: RLOO (arXiv 2402.14740). In a group of one: 0."""
    index_B, size_G = _group_index(groups_B)
    scale_G = size_G / np.maximum(size_G - 1, 1)
    return (_centred(rewards_B, groups_B) * scale_G[index_B]).astype(np.float32)


def max_likelihood_advantages(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float32]:
    """(reward - mean) / mean per group, 0 where the mean is not positive: MaxRL (arXiv 2602.02710).

    Meant for rewards of 0 and 1: rare successes count more than with GRPO.
    """
    index_B, size_G = _group_index(groups_B)
    mean_B = (np.bincount(index_B, weights=rewards_B) / size_G)[index_B]
    is_positive_B = mean_B > 0
    scaled_B = _centred(rewards_B, groups_B) / np.where(is_positive_B, mean_B, 1.0)
    return np.where(is_positive_B, scaled_B, 0.0).astype(np.float32)


def batch_scaled_group_advantages(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float32]:
    """Reward minus the mean of its group, divided by (std of these differences in the batch + 1e-4).

    REINFORCE++ with baseline (arXiv 2501.03262). The differences have mean 0 already.
    """
    return _scaled(_centred(rewards_B, groups_B), np.zeros_like(groups_B))


def pass_at_k_advantages(rewards_B: FloatArray, groups_B: IntArray, *, pass_k: int) -> NDArray[np.float32]:
    """How much better the best of `pass_k` samples is if this one is among them, divided by (deviation + 1e-4).

    Pass@k training (arXiv 2508.10751, equations 10 to 15), for any rewards: of all sets of `pass_k` samples of a group,
    each with its best reward, the mean over those that contain the sample, minus the mean over all, divided by the
    standard deviation over all. A group of no more than `pass_k` samples gets 0.
    """
    index_B, size_G = _group_index(groups_B)
    advantages_B = np.zeros(len(rewards_B))
    for group in np.flatnonzero(size_G > pass_k):
        rows = np.flatnonzero(index_B == group)
        differences_S, deviation = best_of_k_differences(rewards_B[rows], pass_k)
        advantages_B[rows] = differences_S / (deviation + _STD_FLOOR)
    return np.where(zero_variance_samples(rewards_B, groups_B), 0.0, advantages_B).astype(np.float32)


def no_advantages(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float32]:
    """0 for each sample, whatever its reward: the term of the teacher is the whole advantage (`distillation`)."""
    return np.zeros(len(rewards_B), np.float32)


ADVANTAGES: Mapping[str, Callable[..., NDArray[np.float32]]] = {
    "group_mean": group_mean_advantages,
    "group_mean_std": group_standardized_advantages,
    "rloo": leave_one_out_advantages,
    "max_rl": max_likelihood_advantages,
    "group_mean_batch_std": batch_scaled_group_advantages,
    "pass_at_k": pass_at_k_advantages,
    "batch_mean_std": group_standardized_advantages,
    DISTILLATION: no_advantages,
    "return_to_go": group_standardized_advantages,
    "turn_mean_std": group_standardized_advantages,
}
"""By the name in the experiment's `algorithm.advantage`. The last two are what the functions of `token_advantages.py`
compute if each sample is a single token."""


def advantage_function(algorithm: AlgorithmSpec, folder: Path) -> Advantage:
    """Return the advantage that `algorithm.advantage` names; user code is looked up in `folder`.

    Algorithm type mock takes rewards as they are. Raises InvalidArgumentError if user code cannot be loaded.
    """
    if not isinstance(algorithm, Grpo):
        return lambda rewards_B, groups_B: rewards_B.astype(np.float32)
    if algorithm.pass_k is not None:
        return partial(pass_at_k_advantages, pass_k=algorithm.pass_k)
    if algorithm.advantage in ADVANTAGES:
        return ADVANTAGES[algorithm.advantage]
    return _user_advantage(algorithm.advantage, folder)


def compared_groups(algorithm: AlgorithmSpec, groups_B: IntArray) -> IntArray:
    """Return the groups that the advantage compares: one with all samples for `batch_mean_std` (REINFORCE++)."""
    compares_batch = isinstance(algorithm, Grpo) and algorithm.advantage in BATCH_BASELINES
    return np.zeros_like(groups_B) if compares_batch else groups_B


def zero_variance_samples(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.bool_]:
    """True for each sample of a group whose rewards are all equal: it says nothing about which sample was better."""
    index_B, size_G = _group_index(groups_B)
    highest_G = np.full(size_G.shape, -np.inf)
    lowest_G = np.full(size_G.shape, np.inf)
    np.maximum.at(highest_G, index_B, rewards_B)
    np.minimum.at(lowest_G, index_B, rewards_B)
    equal_B: NDArray[np.bool_] = (highest_G == lowest_G)[index_B]
    return equal_B


def _centred(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float64]:
    index_B, size_G = _group_index(groups_B)
    mean_G = np.bincount(index_B, weights=rewards_B) / size_G
    # The mean of n equal floats may differ from them in the last bit, and a std near 0 would magnify that.
    return np.where(zero_variance_samples(rewards_B, groups_B), 0.0, rewards_B - mean_G[index_B])


def _scaled(centred_B: NDArray[np.float64], groups_B: IntArray) -> NDArray[np.float32]:
    """Divide by the sample (n - 1) standard deviation of each group, plus a floor."""
    index_B, size_G = _group_index(groups_B)
    variance_G = np.bincount(index_B, weights=centred_B**2) / np.maximum(size_G - 1, 1)
    return (centred_B / (np.sqrt(variance_G)[index_B] + _STD_FLOOR)).astype(np.float32)


def _group_index(groups_B: IntArray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return each sample's group as 0..G-1, and the size of each group."""
    _, index_B, size_G = np.unique(groups_B, return_inverse=True, return_counts=True)
    return index_B, size_G


def _user_advantage(reference: str, folder: Path) -> Advantage:
    advantage = load_reference(reference, folder)
    if not callable(advantage):
        raise InvalidArgumentError(f"algorithm.advantage {reference}: not a function but {type(advantage).__name__}")

    def checked(rewards_B: FloatArray, groups_B: IntArray) -> NDArray[np.float32]:
        try:
            advantages_B = np.asarray(advantage(rewards_B, groups_B), np.float32)
        except USER_CODE_ERRORS as error:
            raise TrainingFailedError(f"algorithm.advantage {reference}: {exception_text(error)}") from error
        if advantages_B.shape != rewards_B.shape:
            shapes = f"returned shape {list(advantages_B.shape)}; one per sample, {list(rewards_B.shape)}, is needed"
            raise InvalidArgumentError(f"algorithm.advantage {reference}: {shapes}")
        if not np.isfinite(advantages_B).all():
            raise TrainingFailedError(f"algorithm.advantage {reference}: an advantage is not finite")
        return advantages_B

    return checked
