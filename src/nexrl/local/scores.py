"""Statistics of an evaluation: mean, standard error and pass@k of the reward and of each of its components."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from statistics import fmean

import numpy as np

from nexrl.best_of_k import mean_best_of_k


@dataclass(frozen=True)
class ScoredSample:
    """The scores of one sample, by name; `task` is equal for the samples of one task."""

    task: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Score:
    """Statistics of one score over all samples that have it."""

    mean: float
    standard_error: float | None
    """Of the mean; None if all samples are of one task."""
    pass_at_k: Mapping[int, float]
    """By k: the mean over the tasks of the best of k samples. Tasks with fewer than k samples are left out."""


def score_statistics(samples: Iterable[ScoredSample], samples_per_task: int) -> dict[str, Score]:
    """Return the statistics of each score, by its name, the reward first."""
    by_name: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        for name, value in sample.scores.items():
            by_name[name][sample.task].append(value)
    names = sorted(by_name, key=lambda name: (name != "reward", name))
    return {name: _statistics(list(by_name[name].values()), samples_per_task) for name in names}


def _statistics(tasks: Sequence[Sequence[float]], samples_per_task: int) -> Score:
    best = {k: [mean_best_of_k(np.array(task), k) for task in tasks if len(task) >= k] for k in _ks(samples_per_task)}
    pass_at_k = {k: fmean(values) for k, values in best.items() if values}
    return Score(fmean(chain.from_iterable(tasks)), standard_error(tasks), pass_at_k)


def standard_error(tasks: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the mean over all samples; `tasks` has the values of each task.

    Samples of one task are not independent, so tasks are clusters (Miller 2024, arXiv 2411.00640), with the correction
    for few clusters. With one sample for each task it is the sample standard deviation / sqrt(samples).
    """
    if len(tasks) < 2:
        return None
    mean = fmean(chain.from_iterable(tasks))
    squares = sum(sum(value - mean for value in task) ** 2 for task in tasks)
    return sqrt(squares * len(tasks) / (len(tasks) - 1)) / sum(map(len, tasks))


def _ks(samples_per_task: int) -> list[int]:
    """Return the powers of two below the number of samples, and that number."""
    return [*(2**i for i in range(samples_per_task.bit_length()) if 2**i < samples_per_task), samples_per_task]
