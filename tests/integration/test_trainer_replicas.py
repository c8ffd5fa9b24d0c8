"""A trainer of several replicas, as an experiment asks for it: real processes over Gloo, killed one at a time."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from nexrl.checkpoint_files import tensor_files
from nexrl.errors import UnavailableError
from nexrl.spec import Experiment
from nexrl_trainer.checkpoint import find_latest_checkpoint
from tests.support.services import small_experiment
from tests.support.trainers import Call, Death, World, running_world

KILLED, LOST = -9, UnavailableError.exit_code
STEPS, EVERY_STEPS = 8, 3
KILLS = int(os.environ.get("NEXRL_GANG_KILLS", "30")) // 3
CALLS = ("LeaseTrainBatch", "AckTrainBatch", "CommitSync", "CommitCheckpoint", "ResumeFromCheckpoint")
MANY_STEPS = 1000
"""More than are made before a trainer has noticed SIGTERM, on however busy a machine."""
WEIGHT_TOLERANCE = 1e-4
"""Four ranks add up gradients in another order than one, and Adam divides by their size: after 8 steps of 0.01 each."""


def experiment(name: str, replicas: int, processes: int, every_steps: int = EVERY_STEPS, **trainer: Any) -> Experiment:
    return small_experiment(
        name,
        data={"type": "mock", "size": 4096, "shuffle": False},
        trainer={"steps": STEPS, "replicas": replicas, "processesPerReplica": processes, "device": "cpu", **trainer},
        checkpoint={"everySteps": every_steps},
        algorithm={"learningRate": 0.01},
        rollout={"maxNewTokens": 8, "leaseSeconds": 60},
    )


async def undisturbed(folder: Path, redis_url: str, name: str, replicas: int, processes: int) -> World:
    """A run whose trainer is never killed."""
    async with running_world(folder, redis_url, experiment(name, replicas, processes)) as world:
        assert await world.live() == 0
        assert world.codes == replicas * [0]
        return world


def weights_of(path: Path) -> dict[str, NDArray[Any]]:
    """Return the weights in all files of a checkpoint."""
    return {name: tensor for file in tensor_files(path, "model") for name, tensor in load_file(file).items()}


def last_line(world: World, instance: str) -> str:
    return (world.folder / f"{instance}.log").read_text().splitlines()[-1]


@pytest.mark.soak
async def test_two_replicas_of_two_processes_have_the_weights_of_one_process(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    one = await undisturbed(tmp_path / "one", redis_url, f"{experiment_name}-one", 1, 1)
    four = await undisturbed(tmp_path / "four", redis_url, f"{experiment_name}-four", 2, 2)
    assert four.steps == one.steps
    paths = [find_latest_checkpoint(world.folder / "checkpoints") for world in (one, four)]
    expected, weights = (weights_of(path) for path in paths if path is not None)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=WEIGHT_TOLERANCE, err_msg=name)


@pytest.mark.guide("Q20")
@pytest.mark.soak
async def test_the_end_of_any_process_ends_all_replicas_for_that_reason_and_the_run_is_replayed_bit_by_bit(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", 2, 2)
    killed = experiment(f"{experiment_name}-killed", 2, 2)
    async with running_world(tmp_path / "killed", redis_url, killed) as world:
        # A rank of another replica: both replicas end like it.
        assert await world.live(Death("AckTrainBatch", 2, is_seen=True, rank=3)) == KILLED
        assert world.codes == [KILLED, KILLED]
        for instance in ("trainer", "trainer-1"):
            assert "rank 3 of the trainer ended with code -9; unless somebody killed it" in last_line(world, instance)
        # A rank of replica 0.
        assert await world.live(Death("CommitSync", 4, is_seen=False, rank=1)) == KILLED
        assert world.codes == [KILLED, KILLED]
        assert "rank 1 of the trainer ended with code -9" in last_line(world, "trainer-1")
        # Main processes: the other one only knows that it has lost it.
        assert await world.live(Death("AckTrainBatch", 5, is_seen=False, replica=1)) == LOST
        assert world.codes == [LOST, KILLED]
        assert "replica 1 of the trainer, with ranks 2 to 3, has ended or cannot be reached" in last_line(
            world, "trainer"
        )
        assert await world.live(Death("CommitCheckpoint", 6, is_seen=True, rank=0)) == KILLED
        assert world.codes == [KILLED, LOST]
        assert "replica 0 of the trainer has ended or cannot be reached" in last_line(world, "trainer-1")
        assert await world.live() == 0
        assert world.steps == whole.steps
        assert world.final_weights() == whole.final_weights()


@pytest.mark.soak
async def test_replicas_whose_processes_are_killed_at_any_call_have_the_weights_of_those_that_never_were(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", 2, 1)
    killed = experiment(f"{experiment_name}-killed", 2, 1)
    async with running_world(tmp_path / "killed", redis_url, killed) as world:
        for number, name in enumerate(CALLS):
            for target in ({"rank": 0}, {"rank": 1}, {"replica": 1}):
                step = 0 if name == "ResumeFromCheckpoint" else number + 1
                await world.live(Death(name, step, is_seen=bool(number % 2), **target))
                assert KILLED in world.codes
        assert await world.live() == 0
        assert world.steps == whole.steps
        assert world.final_weights() == whole.final_weights()


@pytest.mark.soak
@pytest.mark.timeout(600 + 60 * KILLS)
async def test_replicas_whose_processes_are_killed_at_random_instants_have_the_weights_of_those_that_never_were(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    instants = random.Random(KILLS)
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", 2, 2)
    killed = experiment(f"{experiment_name}-killed", 2, 2)
    async with running_world(tmp_path / "killed", redis_url, killed) as world:
        for kill in range(KILLS):
            await world.live(instants.uniform(1, 10), rank=kill % 4)  # or it is done before
        while await world.live() != 0:
            pass
        assert world.steps == whole.steps
        assert world.final_weights() == whole.final_weights()


@pytest.mark.parametrize("target", ["main", "rank"])
@pytest.mark.soak
async def test_sigterm_on_another_replica_ends_in_one_checkpoint(
    tmp_path: Path, redis_url: str, experiment_name: str, target: str
) -> None:
    endless = experiment(experiment_name, 2, 1, every_steps=MANY_STEPS, steps=MANY_STEPS)
    async with running_world(tmp_path / "world", redis_url, endless) as world:

        async def stop(call: Call) -> None:
            if call.name == "AckTrainBatch" and len(world.steps) == 1:
                if target == "main":
                    world.signal_replica(1, signal.SIGTERM)
                else:
                    world.signal_rank(1, signal.SIGTERM)

        world.before_call = stop
        assert await world.live() == 0
    assert world.codes == [0, 0]
    (saved,) = (path.name for path in (world.folder / "checkpoints").iterdir())
    assert saved == f"global_step_{len(world.steps)}"
    assert 1 <= len(world.steps) < MANY_STEPS
