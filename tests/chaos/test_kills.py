"""A real experiment whose processes are killed at random: `make chaos KILLS=100 SEED=0`."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.chaos import NAMES, Killer, Result, examine, final_weights, schedule, trained_once_on_each
from tests.support.runs import nexrl, running

KILLS = int(os.environ.get("KILLS", "30"))
SEED = int(os.environ.get("SEED", "0"))
RESULT = os.environ.get("RESULT", "")
"""File for the result."""
EXPERIMENT = Path(__file__).with_name("copy-digits.yaml")
STEPS = max(180, 150 + 3 * KILLS)
"""More than are made while the kills last."""
BATCH_SIZE = 128
REWARD = 0.65
"""Of the last steps. Without a kill they have 0.85 or more, and the first ones 0.07."""


@pytest.mark.gate
@pytest.mark.timeout(max(600, 300 + 30 * KILLS))
@pytest.mark.guide("A6", "S3")
async def test_no_kill_costs_a_sample_or_trains_it_twice(tmp_path: Path) -> None:
    began = time.monotonic()
    async with running(tmp_path, f"trainer.steps={STEPS}", file=EXPERIMENT) as run:
        killer = Killer(run)
        await run.until_step(1)
        await killer.kill_all(schedule(SEED, KILLS, NAMES))
        audit_while_on = await audit(run.folder)
        await run.ends()
    remains = await examine(run.folder, STEPS)
    result = Result.of(killer, remains, seed=SEED, seconds=time.monotonic() - began)
    sys.stdout.write(f"\n{result.table()}\n")
    if RESULT:
        await asyncio.to_thread(Path(RESULT).write_text, result.json())

    assert {line["step"] for line in remains.steps} == {*range(1, STEPS + 1)}
    assert remains.checkpointed == [*range(STEPS)]
    assert [len(batch) for batch in remains.batches] == [BATCH_SIZE] * STEPS
    assert (result.trained_twice, result.lost) == (0, 0)
    assert audit_while_on.returncode == 0, audit_while_on.stdout
    audit_after = await audit(run.folder)
    assert audit_after.returncode == 0, audit_after.stdout
    # Two independent sources agree: the records of the ledger, and the batches that the trainer wrote to disk.
    durable = {record.sample_id: record.batch for record in remains.records if record.state == "durable"}
    assert durable == {sample_id: step for step, batch in enumerate(remains.batches) for sample_id in batch}
    # A third source agrees too: the final weights, which depend on the batches.
    once, learned = trained_once_on_each(run.folder, STEPS), final_weights(run.folder)
    assert all(torch.equal(once[name], weights) for name, weights in learned.items())
    assert result.reward_last >= REWARD


async def audit(folder: Path) -> "subprocess.CompletedProcess[str]":
    """`nexrl audit`."""
    return await asyncio.to_thread(nexrl, folder.parent, "audit", str(folder))
