"""A run whose trainer is killed at random instants ends with the same bits as one whose trainer never was."""

import asyncio
import os
import signal
from pathlib import Path
from random import Random

import pytest

from nexrl.v1.trajectory_pool_service_pb2 import BatchLease
from tests.support.runs import Run, batches_of, running

STEPS, KILLS = 40, 6
# One group in the engine at a time: with others in it logits differ in their last bits, and so would the weights.
SYNCHRONOUS = (
    "weightSync.mode=sync",
    "inference.replicas=1",
    "rollout.replicas=1",
    "rollout.workers=8",
    "trajectoryPool.batchSize=32",
    f"trainer.steps={STEPS}",
    "checkpoint.everySteps=7",
    f"failurePolicy.maxRestarts={KILLS}",
)


@pytest.mark.e2e
@pytest.mark.soak
async def test_the_weights_of_a_run_in_mode_sync_do_not_tell_that_its_trainer_was_killed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    async with running(tmp_path / "whole", *SYNCHRONOUS) as whole:
        await whole.ends()

    (tmp_path / "killed").mkdir()
    instants = Random(KILLS)
    async with running(tmp_path / "killed", *SYNCHRONOUS) as run:
        for kill in range(KILLS):
            await run.until_step(1 + kill * STEPS // (KILLS + 1))
            trainer = await run.process("trainer")
            await asyncio.sleep(instants.uniform(0, 0.3))
            os.kill(trainer.pid, signal.SIGKILL)
            await run.process("trainer", other_than=trainer)
        await run.ends()

    assert [contents(batch) for batch in batches_of(run.folder)] == [contents(b) for b in batches_of(whole.folder)]
    assert final_weights(run) == final_weights(whole)


def contents(batch: BatchLease) -> BatchLease:
    """The batch without what may differ: how often it was leased."""
    batch.attempt = 0
    return batch


def final_weights(run: Run) -> bytes:
    return (run.folder / "checkpoints" / f"global_step_{STEPS}" / "model.safetensors").read_bytes()
