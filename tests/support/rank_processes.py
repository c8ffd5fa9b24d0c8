"""Starts the ranks of a trainer as processes, and compares what they learn with what one rank learns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.support.rank_process import RankCase, Trained, main
from tests.support.spawned_processes import SpawnedProcesses


@dataclass(frozen=True)
class Tolerance:
    """How far figures may differ: of metrics relative to their size, of log-probabilities and weights absolute."""

    metric: float
    logprob: float
    weight: float


# A split into other micro-batches and ranks changes the order in which float32 numbers are added up, and nothing else.
# The largest differences measured after these steps: 2e-6 of a metric, 5e-7 of a log-probability, 2e-7 of a weight.
ON_CPUS = Tolerance(metric=2e-5, logprob=5e-6, weight=2e-6)


class RankProcesses(SpawnedProcesses):
    """Processes that can be the ranks of one trainer, on CPUs or (`device` cuda) on GPUs."""

    def __init__(self, folder: Path, number: int, device: str = "cpu") -> None:
        super().__init__(number, main, device)
        self._folder, self._numbers = folder, count()

    def train(self, size: int, cases: Sequence[RankCase]) -> list[list[Trained]]:
        """Train the cases on `size` ranks, and return for each case what each rank has."""
        rendezvous_file = self._folder / f"rendezvous-{next(self._numbers)}"
        by_rank = self.ask((size, str(rendezvous_file), cases), size)
        return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def assert_as_on_one_rank(alone: Trained, by_rank: Sequence[Trained], tolerance: Tolerance = ON_CPUS) -> None:
    """All ranks have the same figures and weights, bit for bit, and a single rank has them up to rounding."""
    for trained in by_rank:
        assert trained.metrics == by_rank[0].metrics
        assert trained.passes == by_rank[0].passes  # or a rank would wait for the others for ever
        for name, weight in by_rank[0].weights.items():
            np.testing.assert_array_equal(trained.weights[name], weight)
        assert_close(alone, trained, tolerance)


def assert_close(expected: Trained, trained: Trained, tolerance: Tolerance) -> None:
    """Both have learned the same up to rounding."""
    assert trained.error == expected.error == ""
    for figures, expected_figures in zip(trained.metrics, expected.metrics, strict=True):
        assert figures == pytest.approx(expected_figures, rel=tolerance.metric, abs=1e-6)
    for logprobs_N, expected_N in zip(trained.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(logprobs_N, expected_N, rtol=0, atol=tolerance.logprob)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(trained.weights[name], weight, rtol=0, atol=tolerance.weight, err_msg=name)
