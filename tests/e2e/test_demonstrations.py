"""Supervised fine-tuning and then reinforcement learning, as their user sees them."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.runs import metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

EXAMPLES = Path(__file__).parents[2] / "examples" / "sort-digits"
STEPS = 30
SMALL = ("trajectoryPool.batchSize=64", "rollout.workers=64", "weightSync.mode=sync", "weightSync.stalenessThreshold=0")


async def test_a_model_learns_from_answers_and_goes_on_by_reinforcement(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "sort_digits.py", tmp_path)
    short = (*SMALL, f"trainer.steps={STEPS}", "algorithm.learningRate=3e-3")
    async with running(tmp_path, *short, file=EXAMPLES / "demonstrations.yaml") as run:
        await run.ends()
    folder = tmp_path / "sort-digits-demonstrated"
    lines = metrics_of(folder)
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == STEPS
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert {line["samples"] for line in steps} == {64}
    assert all(line["staleness_steps_max"] <= 0 for line in steps)
    assert steps[0].keys().isdisjoint({"reward_mean", "mismatch_kl"})
    assert json.loads((folder / "summary.json").read_text())["dropped"] == {}
    held_out = [line["val/reward"] for line in lines if "val/reward" in line]
    assert held_out[-1] > held_out[0] + 0.2

    weights = folder / "checkpoints" / f"global_step_{STEPS}"
    after = ("metadata.name=after", "model.scratch=null", f"model.path={weights}", "trainer.steps=2", "validation=null")
    async with running(tmp_path, *SMALL, *after, file=EXAMPLES / "experiment.yaml") as run:
        await run.ends()
    rewards = [line["reward_mean"] for line in metrics_of(tmp_path / "after") if "reward_mean" in line]
    assert rewards[0] > held_out[0] + 0.2
