"""A run whose trainer has two processes learns what it learns with one, and survives the end of either."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.runs import Run, metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

STEPS = 12
# One group in the engine at a time: with others in it logits differ in their last bits, and so would the samples.
SYNCHRONOUS = (
    "weightSync.mode=sync",
    "inference.replicas=1",
    "rollout.replicas=1",
    "rollout.workers=8",
    "trajectoryPool.batchSize=32",
    f"trainer.steps={STEPS}",
    "checkpoint.everySteps=5",
)
FIGURES = ("loss", "grad_norm", "entropy", "ratio_mean", "mismatch_kl", "reward_mean")
TOLERANCE = 1e-4
"""Ranks add up float32 gradients in another order. Samples stay alike until that moves a probability past a draw."""


@pytest.mark.parametrize(
    ("setting", "leader", "killed"),
    [
        pytest.param("trainer.processesPerReplica=2", "trainer", "trainer-rank-1", marks=pytest.mark.soak),
        ("trainer.replicas=2", "trainer-0", "trainer-1"),
    ],
)
async def test_two_processes_learn_what_one_learns_also_if_one_of_them_is_killed(
    tmp_path: Path, setting: str, leader: str, killed: str
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with running(tmp_path / "one", *SYNCHRONOUS) as one:
        await one.ends()
    async with running(tmp_path / "two", *SYNCHRONOUS, setting) as two:
        await two.until_step(7)
        trainer, rank = await two.process(leader), await two.process(killed)
        os.kill(rank.pid, signal.SIGKILL)
        await two.process(leader, other_than=trainer)
        await two.ends()
    assert figures(two) == pytest.approx(figures(one), rel=TOLERANCE, abs=1e-5)
    expected = weights(one)
    for name, weight in weights(two).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=TOLERANCE, err_msg=name)


def figures(run: Run) -> np.ndarray:
    """The figures of the newest record of each step: a step that was replayed has several."""
    by_step = {record["step"]: record for record in metrics_of(run.folder) if "loss" in record}
    assert sorted(by_step) == list(range(1, STEPS + 1))
    return np.array([[by_step[step][name] for name in FIGURES] for step in sorted(by_step)])


def weights(run: Run) -> dict[str, np.ndarray]:
    files = (run.folder / "checkpoints" / f"global_step_{STEPS}").glob("model*.safetensors")
    return {name: weight for file in files for name, weight in load_file(file).items()}
