"""A run that trains an adapter, as its user sees it."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.runs import metrics_of, nexrl, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

STEPS = 30
MAX_MISMATCH = 1e-8
"""Largest KL between what was served and what is trained, in float32: rounding only."""


@pytest.mark.soak
async def test_an_adapter_is_trained_to_the_end_and_exported(tmp_path: Path) -> None:
    async with running(
        tmp_path,
        "model.lora={rank: 8, alpha: 32}",
        "algorithm.klCoefficient=0.001",
        "weightSync.mode=sync",
        f"trainer.steps={STEPS}",
    ) as run:
        await run.until_step(12)
        trainer = await run.process("trainer")
        os.kill(trainer.pid, signal.SIGKILL)
        await run.process("trainer", other_than=trainer)
        await run.ends()
    records = [record for record in metrics_of(run.folder) if "loss" in record]
    assert {record["step"] for record in records} == set(range(1, STEPS + 1))
    assert max(record["mismatch_kl"] for record in records) < MAX_MISMATCH
    assert records[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert records[-1]["reference_kl"] > 1e-3
    checkpoint = run.folder / "checkpoints" / f"global_step_{STEPS}"
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (8, 32, "LORA")
    assert not (checkpoint / "model.safetensors").exists()
    exported = tmp_path / "exported"
    exporting = nexrl(tmp_path, "export", str(checkpoint), str(exported))
    assert exporting.returncode == 0, exporting.stderr
    assert (exported / "model.safetensors").exists()
