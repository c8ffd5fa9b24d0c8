"""A trainer of several ranks, as an experiment asks for it: real processes over Gloo, killed one at a time."""

import os
import random
import signal
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from nexrl.spec import Experiment
from nexrl.spec.experiment import FOLDER_ANNOTATION
from nexrl_trainer.checkpoint import find_latest_checkpoint
from tests.support.services import small_experiment
from tests.support.trainers import Call, Death, World, running_world

Weights: TypeAlias = dict[str, NDArray[np.float32]]

KILLED, USERS_FAULT = -9, 10
STEPS, EVERY_STEPS = 20, 4
KILLS = int(os.environ.get("NEXRL_GANG_KILLS", "30"))
CALLS = ("LeaseTrainBatch", "AckTrainBatch", "PrepareSync", "CommitSync", "CommitCheckpoint", "ResumeFromCheckpoint")
MANY_STEPS = 1000
"""More than are made before a trainer has noticed SIGTERM, on however busy a machine."""
WEIGHT_TOLERANCE = 1e-5
"""Ranks add up gradients in another order, and Adam divides by their size: after 20 steps of 0.01 each."""


def experiment(
    name: str, ranks: int, steps: int = STEPS, every_steps: int = EVERY_STEPS, **algorithm: Any
) -> Experiment:
    return small_experiment(
        name,
        data={"type": "mock", "size": 4096, "shuffle": False},
        trainer={"steps": steps, "processesPerReplica": ranks, "device": "cpu"},
        checkpoint={"everySteps": every_steps},
        algorithm={"learningRate": 0.01, **algorithm},
        rollout={"maxNewTokens": 8, "leaseSeconds": 60},
    )


async def undisturbed(folder: Path, redis_url: str, name: str, ranks: int) -> World:
    """A run whose trainer is never killed."""
    async with running_world(folder, redis_url, experiment(name, ranks)) as world:
        assert await world.live() == 0
        return world


def newest_weights(world: World) -> Weights:
    path = find_latest_checkpoint(world.folder / "checkpoints")
    assert path is not None
    return {name: weight for file in path.glob("model*.safetensors") for name, weight in load_file(file).items()}


def assert_close(weights: Weights, expected: Weights) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=WEIGHT_TOLERANCE, err_msg=name)


@pytest.mark.gate
async def test_a_gang_of_which_a_rank_is_killed_has_the_weights_of_a_single_rank_and_says_which(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    one = await undisturbed(tmp_path / "one", redis_url, f"{experiment_name}-one", 1)
    async with running_world(tmp_path / "two", redis_url, experiment(f"{experiment_name}-two", 2)) as two:
        assert await two.live(Death("AckTrainBatch", EVERY_STEPS + 1, is_seen=True, rank=1)) == KILLED
        *_, last = (two.folder / "trainer.log").read_text().splitlines()
        assert "rank 1 of the trainer ended with code -9; unless somebody killed it, it used too much memory" in last
        assert await two.live() == 0
        assert two.steps == one.steps
    assert_close(newest_weights(two), newest_weights(one))


@pytest.mark.soak
async def test_a_gang_whose_ranks_are_killed_at_any_call_has_the_weights_of_one_that_never_was(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", 2)
    async with running_world(tmp_path / "killed", redis_url, experiment(experiment_name, 2)) as world:
        for number, name in enumerate(CALLS):
            step = 0 if name == "ResumeFromCheckpoint" else 2 * number
            assert await world.live(Death(name, step, is_seen=bool(number % 2), rank=1)) == KILLED
        assert await world.live(Death("AckTrainBatch", 13, is_seen=True)) == KILLED  # of rank 0
        assert await world.live() == 0
        assert world.steps == whole.steps
        assert world.final_weights() == whole.final_weights()


@pytest.mark.soak
@pytest.mark.timeout(600 + 60 * KILLS)
async def test_a_gang_whose_ranks_are_killed_at_random_instants_has_the_weights_of_one_that_never_was(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    instants = random.Random(KILLS)
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", 3)
    async with running_world(tmp_path / "killed", redis_url, experiment(experiment_name, 3)) as world:
        for kill in range(KILLS):
            await world.live(instants.uniform(1, 10), rank=kill % 3)  # or it is done before
        while await world.live() == KILLED:
            pass
        assert world.steps == whole.steps
        assert world.final_weights() == whole.final_weights()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
@pytest.mark.gate
async def test_sigterm_on_any_rank_ends_in_one_checkpoint(
    tmp_path: Path, redis_url: str, experiment_name: str, rank: int
) -> None:
    endless = experiment(experiment_name, 2, steps=MANY_STEPS, every_steps=MANY_STEPS)
    async with running_world(tmp_path / "world", redis_url, endless) as world:

        async def stop(call: Call) -> None:
            if call.name == "AckTrainBatch" and len(world.steps) == 2:
                world.signal_rank(rank, signal.SIGTERM)

        world.before_call = stop
        assert await world.live() == 0
    (saved,) = (path.name for path in (world.folder / "checkpoints").iterdir())
    assert saved == f"global_step_{len(world.steps)}"
    assert 2 <= len(world.steps) < MANY_STEPS


@pytest.mark.soak
async def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path, redis_url: str, experiment_name: str) -> None:
    one = await undisturbed(tmp_path / "one", redis_url, f"{experiment_name}-one", 1)
    async with running_world(tmp_path / "moved", redis_url, experiment(experiment_name, 2)) as world:
        for ranks, steps in ((2, 6), (1, 10), (4, 14)):
            world.use(experiment(experiment_name, ranks))
            assert await world.live(Death("AckTrainBatch", steps, is_seen=True)) == KILLED
        world.use(experiment(experiment_name, 2))
        assert await world.live() == 0
        assert world.steps == one.steps
    assert world.resumed_from == [0, 4, 8, 12]
    assert_close(newest_weights(world), newest_weights(one))


LOSS = """
import os
from nexrl.algorithm import LossInputs, LossOutputs

def raises(inputs: LossInputs, ranks: str) -> LossOutputs:
    if os.environ.get("NEXRL_RANK", "0") in ranks:
        raise ValueError("this rank has had enough")
    clipped_T = inputs.logprobs_T.detach() > 1
    return LossOutputs(-(inputs.weights_T * inputs.logprobs_T).sum(), clipped_T)
"""


@pytest.mark.parametrize("ranks", ["1", *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in ("0", "01"))])
@pytest.mark.gate
async def test_code_of_the_user_that_raises_on_some_ranks_ends_the_trainer_for_that_reason(
    tmp_path: Path, redis_url: str, experiment_name: str, ranks: str
) -> None:
    (tmp_path / "user_losses_of_ranks.py").write_text(LOSS)
    own = experiment(experiment_name, 2, loss="user_losses_of_ranks:raises", lossConfig={"ranks": ranks})
    own.metadata.annotations[FOLDER_ANNOTATION] = str(tmp_path)
    async with running_world(tmp_path / "world", redis_url, own) as world:
        assert await world.live() == USERS_FAULT
    lines = (world.folder / "trainer.log").read_text().splitlines()
    *_, last = (line for line in lines if line.startswith("{"))  # the other rank may print a warning of PyTorch
    assert "algorithm.loss user_losses_of_ranks:raises: " in last
    assert "this rank has had enough" in last
    assert not list((world.folder / "checkpoints").iterdir())
