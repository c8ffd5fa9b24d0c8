"""The best reward of each set of k samples, over all sets of a group, without listing them.

Suffix: _S samples of a group.
"""

from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray


def best_chances(size: int, k: int) -> NDArray[np.float64]:
    """Return, shape [S], for which share of all sets of k of `size` samples each is the best; `k` is at most `size`.

    The samples are in ascending order of reward: sample j is the best of the sets whose other samples are all before
    it, that is of comb(j, k - 1) sets. Which of several equal rewards counts as the best does not matter.
    """
    total = comb(size, k)
    return np.array([comb(j, k - 1) / total for j in range(size)])  # exact integers: comb overflows int64


def mean_best_of_k(rewards_S: NDArray[np.floating[Any]], k: int) -> float:
    """Return the mean of the best rewards of all sets of k samples; `k` is at most their number.

    It is an unbiased estimate of the best reward of k samples. For rewards of 0 and 1 it is pass@k of Chen et al.
    (arXiv 2107.03374): 1 - comb(n - c, k) / comb(n, k) if c of n samples pass.
    """
    return float(best_chances(len(rewards_S), k) @ np.sort(rewards_S).astype(np.float64))
