"""The examples that train SmolLM2 run. Each other example is in the test of what it shows."""

import shutil
from pathlib import Path

import pytest

from tests.support.packages import needs_reasoning_gym
from tests.support.runs import metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("trajectoryPool.batchSize=4", "trajectoryPool.groupSize=2", "rollout.workers=4", "inference.maxRows=4")


@pytest.mark.parametrize(
    ("example", "name", "weights"),
    [
        ("lora-sums/experiment.yaml", "lora-sums", "adapter_model.safetensors"),
        pytest.param("smollm2-arithmetic.yaml", "smollm2-arithmetic", "model.safetensors", marks=needs_reasoning_gym),
    ],
)
async def test_an_example_of_smollm2_trains_and_saves(tmp_path: Path, example: str, name: str, weights: str) -> None:
    shutil.copy(EXAMPLES / "lora-sums" / "sums.py", tmp_path)
    changes = (*SMALL, "trainer.steps=1", "validation=null")
    async with running(tmp_path, *changes, file=EXAMPLES / example) as run:
        await run.ends()
    folder = tmp_path / name
    assert [line["step"] for line in metrics_of(folder) if "reward_mean" in line] == [1]
    assert (folder / "checkpoints" / "global_step_1" / weights).exists()
