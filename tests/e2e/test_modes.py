"""Other shapes of a run: asynchronous, with several replicas, with an agent, fed by a worker of the user's own."""

import asyncio
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from nexrl.v1.trajectory_pb2 import Trajectory
from tests.support.runs import Run, batches_of, metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

RUN_SECONDS = 150.0
STEPS = 15
SHORT = (f"trainer.steps={STEPS}", "trajectoryPool.batchSize=32", "rollout.workers=64")
CUSTOM_WORKER = Path(__file__).parents[2] / "examples" / "custom_rollout_worker.py"


async def ended_well(root: Path, *overrides: str) -> Run:
    """A short run that has succeeded."""
    async with running(root, *SHORT, *overrides, seconds=RUN_SECONDS) as run:
        assert await run.launcher.wait() == 0
    return run


def staleness_of(run: Run) -> list[float]:
    """The largest staleness of each step."""
    return [line["staleness_steps_max"] for line in metrics_of(run.folder) if "staleness_steps_max" in line]


def turns_of(trajectory: Trajectory) -> int:
    """Stretches of tokens that the policy generated."""
    return sum(now and not before for before, now in pairwise([False, *trajectory.loss_mask]))


@pytest.mark.guide("L15", "L3", "A4")
async def test_batch_async_with_two_of_each_replica_trains_within_the_staleness_threshold(tmp_path: Path) -> None:
    two_of_each = ("inference.replicas=2", "rollout.replicas=2", "trajectoryPool.replicas=2")
    run = await ended_well(tmp_path, "weightSync.mode=batch-async", "weightSync.stalenessThreshold=2", *two_of_each)
    assert len(staleness_of(run)) == STEPS
    assert 0 < max(staleness_of(run)) <= 2
    for name in ("inference", "rollout", "trajectory-pool"):
        assert {log.stem for log in run.folder.glob(f"logs/{name}-*.log")} == {f"{name}-0", f"{name}-1"}


@pytest.mark.guide("L14", "L3", "G18", "F3", "Q8")
async def test_an_agent_in_mode_fully_async_is_trained_on_what_it_says_in_every_turn(tmp_path: Path) -> None:
    agent = ("rollout.type=agent", "rollout.environment=nexrl_rollout.environments.number_guess:number_guess")
    tasks = ("data.factory=copy_digits:numbers_to_guess", "validation=null", "rollout.reward=null")
    room = ("model.scratch.maxPositions=64", "inference.maxTokensPerRow=64", "rollout.maxNewTokens=3")
    mode = ("weightSync.mode=fully-async", "weightSync.stalenessThreshold=3")
    run = await ended_well(tmp_path, *agent, *tasks, *room, *mode)
    assert len(staleness_of(run)) == STEPS
    assert 0 < max(staleness_of(run)) <= 3
    trajectories = [
        trajectory
        for batch in batches_of(run.folder)
        for group in batch.groups
        for sample in group.samples
        for trajectory in sample.trajectories
    ]
    assert max(map(turns_of, trajectories)) > 1
    assert {trajectory.reward for trajectory in trajectories} >= {0.0, 1.0}


@pytest.mark.guide("R3", "A2")
async def test_a_worker_from_outside_the_tree_feeds_a_run_through_grpc_alone(tmp_path: Path) -> None:
    script = shutil.copy(CUSTOM_WORKER, tmp_path)
    async with running(tmp_path, *SHORT, "rollout.replicas=0", seconds=RUN_SECONDS) as run:
        await run.until(lambda experiment: experiment.progress.policy_version == 0)
        addresses = {module.name: module.address for module in (await run.activity()).modules}
        assert not [name for name in run.processes if name.startswith("rollout")]
        arguments = (addresses["trajectory-pool"], addresses["weight-sync"], "01234=")
        worker = await asyncio.create_subprocess_exec(sys.executable, script, *arguments, cwd=tmp_path)
        try:
            assert await run.launcher.wait() == 0
        finally:
            worker.terminate()
            await worker.wait()
    assert len(staleness_of(run)) == STEPS
