"""A run that prefers better samples to worse ones, and whose reference model follows the policy."""

from pathlib import Path

import pytest

from tests.support.runs import metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]


@pytest.mark.soak
async def test_a_run_trains_pairs_with_a_reference_model_that_moves(tmp_path: Path) -> None:
    loss = ("algorithm.loss=dpo", "algorithm.reference={type: average, decay: 0.5}", "algorithm.entropyCoefficient=0")
    short = ("trainer.steps=3", "trajectoryPool.batchSize=32", "rollout.workers=32", "validation=null")
    async with running(tmp_path, *loss, *short) as run:
        await run.ends()
    steps = [line for line in metrics_of(run.folder) if "loss" in line]
    assert len(steps) == 3
    assert all(line["preference_pairs"] > 0 for line in steps)
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: policy and reference are the same
    assert steps[1]["loss"] != pytest.approx(steps[0]["loss"], abs=1e-6)
