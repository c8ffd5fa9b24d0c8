"""The example of a critic, as its user runs it."""

import shutil
from pathlib import Path

import pytest

from tests.support.runs import metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

EXAMPLE = Path(__file__).parents[2] / "examples" / "high-card" / "experiment.yaml"
TURNS = 6
SMALL = ("trajectoryPool.batchSize=16", "rollout.workers=16", "weightSync.mode=sync", "weightSync.stalenessThreshold=0")


async def test_the_example_of_a_critic_trains_it_before_the_policy(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE.with_name("high_card.py"), tmp_path)
    steps = ("trainer.steps=4", "algorithm.criticOnlySteps=2", "algorithm.warmupSteps=0")
    async with running(tmp_path, *SMALL, *steps, file=EXAMPLE) as run:
        await run.ends()
    lines = [line for line in metrics_of(tmp_path / "high-card") if "value_loss" in line]
    assert [line["lr"] > 0 for line in lines] == [False, False, True, True]
    assert all(line["value_loss"] > 0 and line["critic_grad_norm"] > 0 for line in lines)
    assert all(0 <= line["reward/larger"] < 1 for line in lines)
    # The first values are 0, so with gaeLambda 0.9 each turn has 0.9 of the return of the next one.
    of_the_end = lines[0]["reward_mean"] * sum(0.9**turns_left for turns_left in range(TURNS)) / TURNS
    assert lines[0]["return_mean"] == pytest.approx(of_the_end, rel=1e-3)
