"""Trainer processes killed at every boundary of a step, and a Redis that loses their last calls.

What the weights are made of, the sequence of (step, sample ids), is recorded from the calls that the pool has answered.
"""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nexrl.rpc.client import call
from nexrl.spec import Experiment
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl_trainer.checkpoint import SETTLED_SECONDS, find_latest_checkpoint, read_metadata
from nexrl_weight_sync import weight_sync
from tests.support.forgetful_redis import ForgetfulRedis, forgetful_redis
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.pool import TAG
from tests.support.services import small_experiment
from tests.support.trainer_process import Suicide
from tests.support.trainers import Call, Death, World, running_world

KILLED, CONTRADICTED, NOTHING_FITS = -9, 8, 4
LOSS_STEPS, EVERY_STEPS, BATCH_SIZE = 12, 2, 4
RANDOM_KILLS = int(os.environ.get("NEXRL_TRAINER_KILLS", "3"))

CALLS = (
    "ResumeFromCheckpoint",
    "LeaseBatch",
    "PutTrainBatch",
    "LeaseTrainBatch",
    "AckTrainBatch",
    "PrepareSync",
    "CommitSync",
    "CommitCheckpoint",
)
BOUNDARIES = [(name, is_seen) for name in CALLS for is_seen in (False, True)]
"""Only `make soak-trainer` kills a trainer at all of them."""
ONE_OF_EACH = [(name, number % 2 == 0) for number, name in enumerate(CALLS)]
"""For each call, the boundary before it or the one after its answer. For AckTrainBatch it is the one after: the pool
has counted the step, and the trainer does not know it."""
STEPS = len(BOUNDARIES) + EVERY_STEPS  # a death at each boundary, and a checkpoint after all of them


def experiment(name: str, steps: int = STEPS, lease_seconds: float = 60.0, **algorithm: Any) -> Experiment:
    return small_experiment(
        name,
        data={"type": "mock", "size": 4096, "shuffle": False},
        trainer={"steps": steps},
        checkpoint={"everySteps": EVERY_STEPS},
        algorithm={"learningRate": 0.01, **algorithm},
        rollout={"maxNewTokens": 8, "leaseSeconds": lease_seconds},
    )


def forgotten(name: str) -> Experiment:
    """For a Redis that loses writes. If it loses a put, the samples are leased again, and nobody holds their leases.

    So the leases are short. One that ends too early only has its sample made again, with the same tokens.
    """
    return experiment(name, LOSS_STEPS, lease_seconds=1.0)


async def undisturbed(folder: Path, redis_url: str, name: str, steps: int = STEPS, **algorithm: Any) -> World:
    """A run whose trainer is never killed."""
    async with running_world(folder, redis_url, experiment(name, steps, **algorithm)) as world:
        assert await world.live() == 0
    assert [len(sample_ids) for sample_ids in world.steps] == [BATCH_SIZE] * steps
    return world


async def assert_same_run(world: World, whole: World) -> None:
    """Check that the run has the same batches and weights as a run without kills."""
    assert world.steps == whole.steps
    assert all(sample_ids == whole.steps[step] for step, sample_ids in world.acknowledged)
    assert world.final_weights() == whole.final_weights()
    await assert_exactly_once(world)


async def assert_exactly_once(world: World) -> None:
    """No sample is in the weights twice, and the ledger says the same of each as the steps that were made."""
    steps = world.experiment.spec.trainer.steps
    used = [sample_id for sample_ids in world.steps for sample_id in sample_ids]
    assert len(world.steps) == steps
    assert len(used) == len(set(used)) == steps * BATCH_SIZE
    attempts = {(world.tasks[sample_id], sample_id.rpartition(".")[2]) for sample_id in used}
    assert len(attempts) == len(used), "two samples are the same attempt at a task, granted twice"
    audit, state = await world.pool.audit(), await world.pool.state()
    assert not audit.findings
    assert state.imbalance == 0
    trained = {(r.batch_id, r.sample_id) for r in await records(world) if r.state == pool_pb.SAMPLE_STATE_DURABLE}
    assert state.trained == state.durable == len(trained)
    made = {(step, sample_id) for step, sample_ids in enumerate(world.steps) for sample_id in sample_ids}
    first_step = min(step for step, _ in trained)  # a ledger that was lost whole begins at a checkpoint
    assert trained == {(step, sample_id) for step, sample_id in made if step >= first_step}


async def records(world: World) -> Sequence[pool_pb.SampleRecord]:
    request = pool_pb.ListSamplesRequest(model_tag=TAG, page_size=10_000)
    answer = await call(world.pool.pool.ListSamples, request, timeout_seconds=LIMIT_SECONDS)
    assert not answer.next_page_token
    return answer.records


def death(name: str, step: int, is_seen: bool) -> Death:
    """At that boundary of that step, or of the next one that has it."""
    return Death(name, 0 if name == "ResumeFromCheckpoint" else step, is_seen)


def losing(loss: "Loss", redis: ForgetfulRedis, world: World) -> Callable[[Call], Awaitable[None]]:
    """Has `redis` lose it, once."""
    to_come: list[tuple[Death, Callable[[], None]]] = [(Death(*loss.last, is_seen=True), redis.forget)]
    if loss.first is not None:
        to_come.insert(0, (Death(*loss.first, is_seen=False), redis.remember))

    is_another_there, committed_steps, written_steps = asyncio.Event(), 0, 0

    async def is_checkpoint_there() -> bool:
        made = len(world.steps)
        return made % EVERY_STEPS != 0 or made in (
            world.resumed_from[-1],
            committed_steps if to_come else written_steps,
        )

    async def step_in(call: Call) -> None:
        nonlocal committed_steps, written_steps
        if call.name == "CommitCheckpoint":
            written_steps = train_pb.CommitCheckpointRequest.FromString(call.request).steps
            committed_steps = committed_steps if call.response is None else written_steps
        if call.name == "LeaseTrainBatch" and call.response is None:
            # Otherwise it is a race what is lost, and which checkpoints are there then.
            await eventually(is_checkpoint_there)
        if to_come:
            if to_come[0][0].is_due(call, len(world.steps)):
                await asyncio.to_thread(to_come.pop(0)[1])
        elif call.name == "PutTrainBatch" and call.response is not None:
            is_another_there.set()
        elif call.name == "AckTrainBatch" and loss.is_replaced:
            await is_another_there.wait()

    return step_in


def killing_after_a_step_before_the_commit(world: World) -> Callable[[Call], Awaitable[None]]:
    """Kills the trainer, once, when it has a complete checkpoint that is not committed, and has made a later step."""
    committing, killed = asyncio.Event(), False

    async def step_in(call: Call) -> None:
        nonlocal killed
        if killed:
            return
        if call.name == "CommitCheckpoint" and call.response is None:
            committing.set()
            await world.has_ended()
            raise asyncio.CancelledError  # the caller is dead, so no answer is needed
        if call.name == "AckTrainBatch" and call.response is None:
            step = train_pb.AckTrainBatchRequest.FromString(call.request).step
            if step % EVERY_STEPS == 0 and step > world.resumed_from[-1]:
                await committing.wait()  # else the next checkpoint may come first, and wait for this one
        if call.name == "AckTrainBatch" and call.response is not None and committing.is_set():
            killed = True
            world.signal_rank(0, signal.SIGKILL)

    return step_in


def saved_files(world: World) -> int:
    """Files in a checkpoint, its marker included."""
    path = find_latest_checkpoint(world.folder / "checkpoints")
    assert path is not None
    return len(list(path.iterdir()))


@pytest.mark.guide("A6", "D8", "J5", "J9", "J13", "L18")
@pytest.mark.parametrize(
    "deaths", [ONE_OF_EACH[0:2], ONE_OF_EACH[2:4], ONE_OF_EACH[4:6], ONE_OF_EACH[6:8]], ids=lambda two: two[0][0]
)
@pytest.mark.gate
async def test_a_trainer_killed_in_every_step_makes_the_run_of_one_that_never_was(
    tmp_path: Path, redis_url: str, experiment_name: str, deaths: Sequence[tuple[str, bool]]
) -> None:
    steps = len(deaths) + EVERY_STEPS
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", steps)
    async with running_world(tmp_path / "killed", redis_url, experiment(experiment_name, steps)) as world:
        for step, (name, is_seen) in enumerate(deaths):
            assert await world.live(death(name, step, is_seen)) == KILLED
        assert await world.live() == 0
        await assert_same_run(world, whole)
        newest = find_latest_checkpoint(world.folder / "checkpoints")
        assert newest is not None
        assert read_metadata(newest).batch_ids == (steps - 2, steps - 1)


@pytest.mark.gate
async def test_a_trainer_that_is_killed_goes_on_with_its_critic(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    ppo: dict[str, Any] = {"type": "ppo", "critic": {"learningRate": 0.01}}
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", 4, **ppo)
    async with running_world(tmp_path / "killed", redis_url, experiment(experiment_name, 4, **ppo)) as world:
        assert await world.live(Death("CommitCheckpoint", 2, is_seen=True)) == KILLED
        assert await world.live() == 0
        await assert_same_run(world, whole)
    assert world.resumed_from == [0, 2]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "is_seen"), BOUNDARIES)
async def test_a_trainer_killed_at_one_boundary_of_every_step_makes_the_run_of_one_that_never_was(
    tmp_path: Path, redis_url: str, experiment_name: str, name: str, is_seen: bool
) -> None:
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole")
    async with running_world(tmp_path / "killed", redis_url, experiment(experiment_name)) as world:
        for step in range(len(BOUNDARIES)):
            if name == "ResumeFromCheckpoint" or step >= len(world.steps):  # else the death before came that late
                assert await world.live(death(name, step, is_seen)) == KILLED
        assert await world.live() == 0
        await assert_same_run(world, whole)


@pytest.mark.guide("D9")
@pytest.mark.soak
async def test_a_trainer_killed_within_a_step_or_a_checkpoint_makes_the_run_of_one_that_never_was(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole")
    files = saved_files(whole)
    async with running_world(tmp_path / "killed", redis_url, experiment(experiment_name)) as world:
        assert await world.live(Death("AckTrainBatch", 3, is_seen=True)) == KILLED
        # Of the checkpoint's own files the first and the last; its marker; its folder, before and after the rename.
        for write in (1, files - 1, files, files + 1, files + 2):
            assert await world.live(Suicide("sync to disk", write, steps_meanwhile=1)) == KILLED
        world.before_call = killing_after_a_step_before_the_commit(world)
        assert await world.live() == KILLED
        for call_number in (1, 2, 3):
            assert await world.live(Suicide("update", call_number)) == KILLED
        for call_number in (1, 2, 3):  # the first is of the writer; then the one before the last checkpoint goes
            assert await world.live(Suicide("delete", call_number)) == KILLED
        assert await world.live() == 0
        await assert_same_run(world, whole)


@pytest.mark.timeout(max(600, 30 * RANDOM_KILLS))
@pytest.mark.soak
async def test_a_trainer_killed_at_random_instants_makes_the_run_of_one_that_never_was(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    delays, steps = random.Random(RANDOM_KILLS), STEPS + 4 * RANDOM_KILLS
    whole = await undisturbed(tmp_path / "whole", redis_url, f"{experiment_name}-whole", steps)
    async with running_world(tmp_path / "killed", redis_url, experiment(experiment_name, steps)) as world:
        for _ in range(RANDOM_KILLS):
            await world.live(delays.uniform(0.1, 0.8))  # or it is done before
        while await world.live() == KILLED:
            pass
        await assert_same_run(world, whole)


@dataclass(frozen=True)
class Loss:
    """Redis loses all from before the call `first` to after the call `last`, each the next of its name after so many
    steps."""

    first: tuple[str, int] | None
    """None: all that it ever had."""
    last: tuple[str, int]
    is_noticed: bool | None
    """Whether the trainer has made something of what is lost; None where that is a race."""
    put_aside: tuple[int, ...] = ()
    """Checkpoints of which the ledger has lost the record."""
    is_replaced: bool = False
    """Whether the trainer is held up at its next acknowledgement until another train batch is there."""


# A batch is granted, produced and formed after the commit of the version before it.
LOSSES = {
    "an acknowledgement": Loss(("AckTrainBatch", 6), ("AckTrainBatch", 7), True),
    "an acknowledgement within a checkpoint": Loss(("AckTrainBatch", 7), ("AckTrainBatch", 8), True, (8,)),
    "steps and their checkpoints": Loss(("AckTrainBatch", 5), ("CommitCheckpoint", 10), True, (6, 8, 10)),
    "a committed checkpoint": Loss(("CommitCheckpoint", 8), ("CommitCheckpoint", 8), False),
    "a train batch": Loss(("PutTrainBatch", 5), ("PutTrainBatch", 5), None),
    "a batch": Loss(("CommitSync", 7), ("LeaseBatch", 7), False),
    "a batch and its train batch": Loss(("CommitSync", 7), ("PutTrainBatch", 7), None),
    "a batch that is being trained": Loss(("CommitSync", 7), ("LeaseTrainBatch", 7), True),
    "a batch that is being trained, and another is made": Loss(
        ("CommitSync", 7), ("LeaseTrainBatch", 7), True, is_replaced=True
    ),
    "everything": Loss(None, ("PutTrainBatch", 7), True),
    "the beginning of a trainer": Loss(("ResumeFromCheckpoint", 0), ("ResumeFromCheckpoint", 0), True),
}


IN_SOAK = {
    "an acknowledgement",
    "a batch and its train batch",
    "steps and their checkpoints",
    "an acknowledgement within a checkpoint",
    "a committed checkpoint",
    "a train batch",
    "a batch",
    "a batch that is being trained",
    "the beginning of a trainer",
}
"""What is also lost in another one of LOSSES."""


@pytest.mark.parametrize(
    "lost", [pytest.param(lost, marks=[pytest.mark.soak] if lost in IN_SOAK else []) for lost in LOSSES]
)
@pytest.mark.gate
async def test_what_redis_has_lost_is_made_again_and_nothing_is_trained_twice(
    tmp_path: Path, experiment_name: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "REPEAT_SECONDS", 0.2)
    loss = LOSSES[lost]
    with forgetful_redis() as redis:
        async with running_world(tmp_path / "world", redis.url, forgotten(experiment_name)) as world:
            world.settled_seconds = SETTLED_SECONDS
            world.before_call = losing(loss, redis, world)
            code, lives = await world.live(), 1
            while code == CONTRADICTED:
                code, lives = await world.live(), lives + 1
            assert code == 0
            assert loss.is_noticed is None or lives == 1 + loss.is_noticed
            await assert_exactly_once(world)
    aside = {path.name for path in (world.folder / "checkpoints").glob("*.ahead-of-ledger")}
    assert aside == {f"global_step_{step}.ahead-of-ledger" for step in loss.put_aside}


@pytest.mark.gate
async def test_a_trainer_without_a_checkpoint_that_fits_says_what_is_there_and_what_to_do(
    tmp_path: Path, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "REPEAT_SECONDS", 0.2)
    with forgetful_redis() as redis:
        async with running_world(tmp_path / "world", redis.url, forgotten(experiment_name)) as world:
            # Its older checkpoints are deleted at once: the ledger goes back further than Redis may.
            world.before_call = losing(LOSSES["steps and their checkpoints"], redis, world)
            assert [await world.live(), await world.live()] == [CONTRADICTED, NOTHING_FITS]
    written = (world.folder / "trainer.log").read_text()
    there = sorted(path.name for path in (world.folder / "checkpoints").glob("global_step_*"))
    assert {"global_step_10.ahead-of-ledger", "global_step_8.ahead-of-ledger"} <= {*there}  # 6 may end with the trainer
    assert (
        f"no checkpoint fits the ledger, which can resume from 4 to 5 steps. In {world.folder}/checkpoints: "
        f"{', '.join(there)}; tried last: the initial weights." in written
    )
