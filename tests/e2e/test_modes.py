"""Other shapes of a run: asynchronous, with several replicas, with an agent, fed by a worker of the user's own."""

import asyncio
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nexrl.rpc.client import call, connect
from nexrl.v1.trajectory_pb2 import Trajectory
from nexrl.v1.trajectory_pool_service_pb2 import GetTrajectoryPoolStateRequest
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.runs import Run, batches_of, metrics_of, running

if TYPE_CHECKING:
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceAsyncStub

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

STEPS = 15
SHORT = (f"trainer.steps={STEPS}", "trajectoryPool.batchSize=32", "rollout.workers=64")
CUSTOM_WORKER = Path(__file__).parents[2] / "examples" / "custom_rollout_worker.py"


async def ended_well(root: Path, *overrides: str) -> Run:
    """A short run that has succeeded."""
    async with running(root, *SHORT, *overrides) as run:
        await run.ends()
    return run


def staleness_of(run: Run) -> list[float]:
    """The largest staleness of each step."""
    return [line["staleness_steps_max"] for line in metrics_of(run.folder) if "staleness_steps_max" in line]


async def address_of(run: Run, name: str) -> str:
    """Where a service of the run listens."""
    return {module.name: module.address for module in (await run.activity()).modules}[name]


async def granted_by(pool: "TrajectoryPoolServiceAsyncStub") -> int:
    """Samples that the pool has granted so far."""
    state = await call(pool.GetTrajectoryPoolState, GetTrajectoryPoolStateRequest(), timeout_seconds=LIMIT_SECONDS)
    return sum(pool.granted for pool in state.pools)


def turns_of(trajectory: Trajectory) -> int:
    """Stretches of tokens that the policy generated."""
    return sum(now and not before for before, now in pairwise([False, *trajectory.loss_mask]))


@pytest.mark.guide("L2", "L14", "L15", "Q26")
@pytest.mark.soak
@pytest.mark.parametrize(("mode", "granted"), [("batch-async", 3 * 32), ("fully-async", 160)])
async def test_rollouts_run_ahead_as_far_as_the_mode_allows(tmp_path: Path, mode: str, granted: int) -> None:
    settings = (f"weightSync.mode={mode}", "weightSync.stalenessThreshold=2", "rollout.workers=160", "validation=null")
    async with running(tmp_path, *SHORT, *settings) as run:
        run.hold()
        await run.until(lambda experiment: experiment.progress.policy_version == 0)
        async with connect(await address_of(run, "trajectory-pool")) as channel:
            pool: TrajectoryPoolServiceAsyncStub = TrajectoryPoolServiceStub(channel)

            async def are_granted() -> bool:
                return await granted_by(pool) >= granted

            await eventually(are_granted)
            await asyncio.sleep(1)  # enough for a grant that must not come
            assert await granted_by(pool) == granted
        run.release()
        await run.ends()
    assert max(staleness_of(run)) <= 2


@pytest.mark.soak
async def test_a_run_trains_with_corrections_and_with_penalties_on_length_and_distance(tmp_path: Path) -> None:
    loss = ("algorithm.loss=gspo", "algorithm.advantage=batch_mean_std", "algorithm.truncatedSamples=drop")
    penalties = ("algorithm.overlongPenalty={afterTokens: 0, fullTokens: 4}", "algorithm.klRewardCoefficient=0.1")
    # The band is a single ratio, which rounding misses for some tokens.
    band = ("algorithm.correction={tokenBand: {low: 1.0, high: 1.0}}", "weightSync.mode=sync", "validation=null")
    run = await ended_well(tmp_path, *loss, *penalties, *band)
    steps = [line for line in metrics_of(run.folder) if "reward_penalty_mean" in line]
    assert len(steps) == STEPS
    assert min(line["reward_penalty_mean"] for line in steps) > 0.1
    assert any(0 < line["left_out_fraction"] < 1 for line in metrics_of(run.folder) if "left_out_fraction" in line)


@pytest.mark.soak
async def test_a_run_with_truncated_sampling_trains_on_the_probabilities_that_its_tokens_were_drawn_with(
    tmp_path: Path,
) -> None:
    sampling = ("rollout.topP=0.8", "rollout.topK=4", "rollout.temperature=1.3", "rollout.stop=['33']")
    run = await ended_well(tmp_path, "weightSync.mode=sync", "validation=null", *sampling)
    mismatches = [line["mismatch_kl"] for line in metrics_of(run.folder) if "mismatch_kl" in line]
    assert len(mismatches) > STEPS / 2  # a batch whose groups are all of equal rewards trains nothing
    assert max(mismatches) < 1e-4  # strictly on-policy: the ratio of each token is 1
    ends = [
        (list(trajectory.token_ids[completion.end - 2 : completion.end]), trajectory.response)
        for batch in batches_of(run.folder)
        for group in batch.groups
        for sample in group.samples
        for trajectory in sample.trajectories
        for completion in trajectory.completions
    ]
    three = 7  # the token of "3"
    assert any(tokens == [three, three] for tokens, _ in ends)
    assert not any("33" in text for _, text in ends)


@pytest.mark.soak
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


@pytest.mark.soak  # the same worker: tests/integration/test_rollout.py
@pytest.mark.guide("R3", "A2")
async def test_a_worker_from_outside_the_tree_feeds_a_run_through_grpc_alone(tmp_path: Path) -> None:
    script = shutil.copy(CUSTOM_WORKER, tmp_path)
    async with running(tmp_path, *SHORT, "rollout.replicas=0") as run:
        await run.until(lambda experiment: experiment.progress.policy_version == 0)
        addresses = {module.name: module.address for module in (await run.activity()).modules}
        assert not [name for name in run.processes if name.startswith("rollout")]
        arguments = (addresses["trajectory-pool"], addresses["weight-sync"], "01234=")
        worker = await asyncio.create_subprocess_exec(sys.executable, script, *arguments, cwd=tmp_path)
        try:
            await run.ends()
        finally:
            worker.terminate()
            await worker.wait()
    assert len(staleness_of(run)) == STEPS
