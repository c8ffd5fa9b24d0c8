"""What a run survives: its launcher killed, Ctrl-C, and the death of each of its processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from nexrl.datasets import open_datasets
from nexrl.errors import AlreadyExistsError
from nexrl.spec import load_resolved
from nexrl.store import Redis, key_prefix
from nexrl.v1.controller_service_pb2 import PHASE_STOPPING
from nexrl_trajectory_pool.ledger import Ledger, LedgerState
from nexrl_trajectory_pool.pool import training_rules
from tests.support.runs import (
    EXPERIMENT,
    batches_of,
    metrics_of,
    nexrl,
    processes_in,
    running,
    until_gone,
)

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

INTERRUPTED_EXIT = 130
BATCH_SIZE = 32
# Samples of a worker that was killed come back when its lease has run out. A lease of a living worker that ends too
# early, on a busy machine, costs only time: no test here counts attempts.
SMALL_BATCHES = (f"trajectoryPool.batchSize={BATCH_SIZE}", "rollout.workers=32", "rollout.leaseSeconds=5")


@pytest.mark.guide("D3", "D8", "D9", "L18", "Q41", "J10")
async def test_a_run_that_was_killed_and_interrupted_goes_on_to_its_end(tmp_path: Path) -> None:
    overrides = (*SMALL_BATCHES, "trainer.steps=40", "checkpoint.everySteps=8", "resume.mode=auto")

    async with running(tmp_path, *overrides) as run:
        await run.until_step(12)
        run.launcher.kill()
        await run.launcher.wait()
        await until_gone(tmp_path)
    killed_after = [line["step"] for line in steps_of(run.folder)][-1]

    async with running(tmp_path, *overrides) as run:
        await run.until_step(int(killed_after) + 3)
        run.launcher.send_signal(signal.SIGINT)
        await run.ends(INTERRUPTED_EXIT)
        said = (tmp_path / "output").read_text().splitlines()
        assert "stopping: the trainer writes a checkpoint, then every process ends" in said
        assert said[-1].startswith("stopped; resume from step ")
        assert said[-1].endswith(f"{' '.join(overrides)} --root {tmp_path}")
        assert not processes_in(tmp_path)
    interrupted_after = [line["step"] for line in steps_of(run.folder)][-1]
    assert (run.folder / "checkpoints" / f"global_step_{interrupted_after:.0f}").is_dir()

    async with running(tmp_path, *overrides) as run:
        await run.ends()

    async with running(tmp_path, *overrides) as run:  # nothing is left to be done
        await run.ends()

    lines = steps_of(run.folder)
    assert {line["step"] for line in lines} == {*range(1, 41)}
    after_ctrl_c = [line["step"] for line in lines if line["step"] > interrupted_after]
    assert after_ctrl_c == [*range(int(interrupted_after) + 1, 41)]
    for step in range(1, 41):  # what was lost with the launcher was trained again, on the same batches
        assert len({(line["reward_mean"], line["loss"]) for line in lines if line["step"] == step}) == 1


@pytest.mark.guide("A6", "S3")
@pytest.mark.soak
async def test_the_death_of_any_process_costs_no_step_and_no_sample(
    tmp_path: Path, redis: Redis, redis_url: str
) -> None:
    steps, mortals = (
        200,  # more than are made while a process that training does without restarts
        ("rollout-0", "inference-0", "trajectory-pool", "weight-sync", *2 * ("controller", "trainer")),
    )
    overrides = (
        *SMALL_BATCHES,
        f"trainer.steps={steps}",
        f"redis.url={redis_url}",
        "checkpoint.everySteps=2",  # so the second death of the trainer comes after a new checkpoint
        "failurePolicy.maxRestarts=1",
    )

    async with running(tmp_path, *overrides) as run:
        step = await run.until_step(1)
        # Refused before it touches the ledger, which is in the same Redis.
        second = await asyncio.to_thread(nexrl, tmp_path, "run", EXPERIMENT, *overrides, "--root", ".")
        assert second.returncode == AlreadyExistsError.exit_code
        for name in mortals:
            step = await run.until_step(step + 4)
            mortal = await run.process(name)
            os.kill(mortal.pid, signal.SIGKILL)
            await run.process(name, other_than=mortal)
        await run.ends()

    assert {line["step"] for line in steps_of(run.folder)} == {*range(1, steps + 1)}
    trained = batches_of(run.folder)[:steps]
    sample_ids = [sample.sample_id for batch in trained for group in batch.groups for sample in group.samples]
    assert len(sample_ids) == len(set(sample_ids)) == steps * BATCH_SIZE
    ledger = await ledger_of(run.folder, redis)
    assert ledger.imbalance == 0
    assert ledger["trained"] == ledger["durable"] == steps * BATCH_SIZE


@pytest.mark.guide("A6")
async def test_a_run_whose_controller_and_redis_die_while_it_stops_ends_well(tmp_path: Path) -> None:
    async with running(tmp_path, *SMALL_BATCHES, "trainer.steps=3") as run:
        await run.until(lambda experiment: experiment.phase == PHASE_STOPPING)
        for name in ("controller", "redis"):
            os.kill((await run.process(name)).pid, signal.SIGKILL)
        await run.ends()


def steps_of(run: Path) -> list[dict[str, float]]:
    """Metrics of training steps, as they were written: of a step that was trained again, more than once."""
    return [line for line in metrics_of(run) if "reward_mean" in line]


async def ledger_of(run: Path, redis: Redis) -> LedgerState:
    """The ledger that a run has left in `redis`."""
    experiment = load_resolved(run / "experiment.yaml")
    rules = training_rules(experiment.spec, open_datasets(experiment.spec, experiment.folder).train.total)
    return await Ledger(redis, key_prefix(experiment.metadata.name, experiment.spec.model.tag), rules).state()
