"""The best reward of each set of k samples, over all sets of a group, without listing them.

Suffix: _S samples of a group.
"""

from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray


def best_of_k_differences(rewards_S: NDArray[np.floating[Any]], k: int) -> tuple[NDArray[np.float64], float]:
    """Return, of the best rewards of all sets of k samples, what each sample changes, and their standard deviation.

    The first, shape [S], is the mean over the sets that contain the sample, minus the mean over all sets. There must be
    more than k samples.

    With the rewards in ascending order, sample j is the best of the sets whose other samples are all before it, that is
    of comb(j, k - 1) sets, and of comb(j - 1, k - 2) sets that contain a given sample before it. Which of several equal
    rewards counts as the best does not matter.
    """
    size = len(rewards_S)
    order_S = np.argsort(rewards_S, kind="stable")
    sorted_S = rewards_S[order_S].astype(np.float64)
    wins = [comb(j, k - 1) for j in range(size)]
    is_best_S = _chances(wins, comb(size, k))
    best_with_another_S = _chances(
        [comb(j - 1, k - 2) if j and k > 1 else 0 for j in range(size)], comb(size - 1, k - 1)
    )
    best_with_itself_S = _chances(wins, comb(size - 1, k - 1))
    mean = float(is_best_S @ sorted_S)
    deviation = float(np.sqrt(is_best_S @ (sorted_S - mean) ** 2))
    after_S = np.cumsum((best_with_another_S * sorted_S)[::-1])[::-1] - best_with_another_S * sorted_S
    differences_S = np.empty(size)
    differences_S[order_S] = best_with_itself_S * sorted_S + after_S - mean
    return differences_S, deviation


def _chances(counts: list[int], total: int) -> NDArray[np.float64]:
    return np.array([count / total for count in counts])  # exact integers: comb overflows int64 in large groups
