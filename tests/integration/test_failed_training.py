"""A real trainer and train batches that cannot be trained: they are dropped and named, and the run continues."""

import asyncio
from pathlib import Path

import pytest

from nexrl.rpc.client import call
from nexrl.spec import Experiment
from nexrl.v1 import trajectory_pb2
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from tests.support import trainers
from tests.support.patience import LIMIT_SECONDS
from tests.support.pool import TAG
from tests.support.services import small_experiment
from tests.support.trainers import World, running_world

STEPS, BATCH_SIZE = 6, 4
TRAINING_FAILED = 10
TOO_LARGE = 1e39
"""A reward that is finite, and infinite as float32: its gradient is not a number."""


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of tasks whose samples have a reward of TOO_LARGE, or of 0."""
    poisoned: set[int] = set()
    trajectory = trainers.trajectory

    def made(lease: trajectory_pb2.TaskLease, sample_id: str, version: int) -> trajectory_pb2.Trajectory:
        found = trajectory(lease, sample_id, version)
        if int(lease.group_id.partition("-")[0]) in poisoned:
            found.reward *= TOO_LARGE
        return found

    monkeypatch.setattr(trainers, "trajectory", made)
    return poisoned


def experiment(name: str, steps: int = STEPS, every_steps: int = 2) -> Experiment:
    return small_experiment(
        name,
        data={"type": "mock", "size": 4096, "shuffle": False},
        trainer={"steps": steps},
        checkpoint={"everySteps": every_steps},
        algorithm={"learningRate": 0.01, "advantage": "group_mean"},
    )


async def dropped_samples(world: World) -> dict[str, int]:
    """Batch of each sample that was dropped because its training failed."""
    request = pool_pb.ListSamplesRequest(model_tag=TAG, page_size=10_000)
    records = (await call(world.pool.pool.ListSamples, request, timeout_seconds=LIMIT_SECONDS)).records
    return {r.sample_id: r.batch_id for r in records if r.drop_reason == "training_failed"}


@pytest.mark.gate
async def test_a_batch_that_cannot_be_trained_is_dropped_and_named_and_the_run_ends(
    tmp_path: Path, redis_url: str, experiment_name: str, poison: set[int]
) -> None:
    poison |= {4}  # of batch 2, whose other task is sound
    async with running_world(tmp_path / "world", redis_url, experiment(experiment_name)) as world:
        assert await world.live() == 0
        state = await world.pool.state()
        assert dict(state.dropped) == {"training_failed": BATCH_SIZE}
        assert (state.trained, state.durable, state.imbalance) == ((STEPS - 1) * BATCH_SIZE,) * 2 + (0,)
        assert not (await world.pool.audit()).findings
        dropped = await dropped_samples(world)
        assert dropped == dict.fromkeys(world.steps[2], 2)
        assert len(world.steps) == STEPS, "step 2 counts, and trains nothing"
    written = await asyncio.to_thread((world.folder / "trainer.log").read_text)
    assert f"dropped its samples {' '.join(world.steps[2])}" in written


@pytest.mark.gate
async def test_a_trainer_killed_between_the_two_failures_goes_on_counting_them(
    tmp_path: Path, redis_url: str, experiment_name: str, poison: set[int]
) -> None:
    poison |= {4}
    async with running_world(tmp_path / "world", redis_url, experiment(experiment_name)) as world:
        assert await world.live(trainers.Death("FailTrainBatch", 2, is_seen=True)) == -9
        assert await world.live() == 0
        state = await world.pool.state()
        assert (dict(state.dropped), state.imbalance) == ({"training_failed": BATCH_SIZE}, 0)
        assert not (await world.pool.audit()).findings


@pytest.mark.gate
async def test_a_run_of_which_no_batch_can_be_trained_ends(
    tmp_path: Path, redis_url: str, experiment_name: str, poison: set[int]
) -> None:
    poison |= set(range(1000))
    async with running_world(tmp_path / "world", redis_url, experiment(experiment_name)) as world:
        assert await world.live() == TRAINING_FAILED
        assert dict((await world.pool.state()).dropped) == {"training_failed": 3 * BATCH_SIZE}


@pytest.mark.parametrize(("steps", "lives"), [(2, 2), pytest.param(4, 3, marks=pytest.mark.soak)])
@pytest.mark.gate
async def test_a_short_run_of_which_no_batch_can_be_trained_never_succeeds(
    tmp_path: Path, redis_url: str, experiment_name: str, poison: set[int], steps: int, lives: int
) -> None:
    poison |= set(range(1000))
    # Without a checkpoint in between: `live` stops the trainer at the checkpoint of the last step.
    short = experiment(experiment_name, steps, every_steps=0)
    async with running_world(tmp_path / "world", redis_url, short) as world:
        for _ in range(lives):
            assert await world.live() == TRAINING_FAILED
        assert dict((await world.pool.state()).dropped) == {"training_failed": steps * BATCH_SIZE}
    written = await asyncio.to_thread((world.folder / "trainer.log").read_text)
    assert f"the last {steps} of {steps} batches were dropped" in written
