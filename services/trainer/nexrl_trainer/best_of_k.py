"""What each sample of a group changes in the best rewards of its sets of k samples (nexrl.best_of_k).

Suffix: _S samples of a group.
"""

from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexrl.best_of_k import best_chances


def best_of_k_differences(rewards_S: NDArray[np.floating[Any]], k: int) -> tuple[NDArray[np.float64], float]:
    """Return, of the best rewards of all sets of k samples, what each sample changes, and their standard deviation.

    The first, shape [S], is the mean over the sets that contain the sample, minus the mean over all sets. There must be
    more than k samples.

    With the rewards in ascending order, of the sets that contain a given sample before j, j is the best of
    comb(j - 1, k - 2).
    """
    size = len(rewards_S)
    order_S = np.argsort(rewards_S, kind="stable")
    sorted_S = rewards_S[order_S].astype(np.float64)
    is_best_S = best_chances(size, k)
    sets_with_another = comb(size - 1, k - 1)
    best_with_another_S = np.array(
        [comb(j - 1, k - 2) / sets_with_another if j and k > 1 else 0.0 for j in range(size)]
    )
    best_with_itself_S = is_best_S * size / k  # a sample is in k of `size` sets
    mean = float(is_best_S @ sorted_S)
    deviation = float(np.sqrt(is_best_S @ (sorted_S - mean) ** 2))
    after_S = np.cumsum((best_with_another_S * sorted_S)[::-1])[::-1] - best_with_another_S * sorted_S
    differences_S = np.empty(size)
    differences_S[order_S] = best_with_itself_S * sorted_S + after_S - mean
    return differences_S, deviation
