"""The trainer against the real pool: killed between any two calls it makes the same steps; training as a service."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from nexrl.checkpoint_files import check_files
from nexrl.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NotFoundError,
)
from nexrl.models import iter_weights
from nexrl.rpc.client import call, connect
from nexrl.rpc.server import ServiceProcess
from nexrl.tensor_proto import decode_tensor
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.train_batch_proto import encode_train_batch
from nexrl.v1 import trainer_service_pb2 as pb
from nexrl.v1.trainer_service_pb2_grpc import TrainerServiceStub, add_TrainerServiceServicer_to_server
from nexrl_trainer.checkpoint import HeldCheckpoint, find_latest_checkpoint, read_metadata
from nexrl_trainer.held_state import HeldState
from nexrl_trainer.loop import TrainWorker
from nexrl_trainer.service import TrainerServicer
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.services import running_service
from tests.support.training import STEPS, KillAt, RecordingLearner, World, building_worlds

if TYPE_CHECKING:
    from nexrl.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

Weights = dict[str, torch.Tensor]


@pytest.fixture
async def build(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> AsyncIterator[Callable[[str], Awaitable[World]]]:
    """Builds worlds of their own folder and ledger."""
    async with building_worlds(tmp_path, redis_url, experiment_name) as start:
        yield start


def weights(worker: TrainWorker) -> Weights:
    return {name: tensor.clone() for name, tensor in iter_weights(worker.learner.model)}


@pytest.mark.guide("A6", "D8", "L18")
async def test_a_trainer_killed_at_any_call_makes_the_same_steps_as_one_that_never_was(
    build: Callable[[str], Awaitable[World]],
) -> None:
    never_killed = await build("whole")
    whole = await never_killed.live()
    assert whole is not None
    assert never_killed.publisher.published == [0, 1, 2, 3, 4]
    expected = dict(never_killed.made)
    assert [step for step, _ in never_killed.made] == [0, 1, 2, 3]
    for is_seen in (False, True):
        world = await build(f"killed-{is_seen}".lower())
        survivor, lives = None, 0
        while survivor is None:
            lives += 1
            survivor = await world.live(KillAt(lives, is_seen=is_seen))
        assert lives > 8
        assert {step for step, _ in world.made} == set(expected)
        assert all(expected[step] == batch for step, batch in world.made), "a step is always made of the same batch"
        assert all(torch.equal(tensor, weights(survivor)[name]) for name, tensor in weights(whole).items())
        state = await world.pool.state()
        assert (state.trained, state.durable, state.imbalance) == (16, 16, 0)


@pytest.mark.guide("J10")
async def test_a_trainer_that_is_stopped_leaves_a_checkpoint_of_what_was_acknowledged(
    build: Callable[[str], Awaitable[World]],
) -> None:
    world = await build("stopped")
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        training = asyncio.create_task(worker.run())
        await world.pool.lease_batch(wait_seconds=10)  # no processor: the first step is waited for
        await worker.stop()
        training.cancel()
        await asyncio.wait([training])
    path = find_latest_checkpoint(world.folder / "checkpoints")
    assert path is not None
    assert path.name == "global_step_0"


async def test_a_stop_saves_nothing_of_a_step_whose_updates_are_not_all_made(
    build: Callable[[str], Awaitable[World]],
) -> None:
    world = await build("half")
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        training = asyncio.create_task(worker.run())
        await worker.has_begun.wait()
        worker.learner.is_between_steps = False
        await worker.stop()
        training.cancel()
        await asyncio.wait([training])
    assert find_latest_checkpoint(world.folder / "checkpoints") is None


@pytest.mark.guide("J10")
async def test_a_stop_waits_for_the_step_in_hand_and_saves_it(build: Callable[[str], Awaitable[World]]) -> None:
    world = await build("within")
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        assert isinstance(worker.learner, RecordingLearner)
        worker.learner.gate.clear()
        processor = world.processor(channel, worker)
        tasks = [asyncio.create_task(worker.run()), asyncio.create_task(processor.run())]
        await asyncio.to_thread(worker.learner.is_training.wait, LIMIT_SECONDS)
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0)
        worker.learner.gate.set()
        await stopping
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    path = find_latest_checkpoint(world.folder / "checkpoints")
    assert path is not None
    assert path.name == "global_step_1"


@pytest.mark.guide("J10")
async def test_steps_are_made_while_a_checkpoint_is_written_and_a_stop_waits_for_it(
    build: Callable[[str], Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), HeldCheckpoint.write

    def write_late(held: HeldCheckpoint) -> Path:
        assert may_write.wait(LIMIT_SECONDS)
        return write(held)

    monkeypatch.setattr(HeldCheckpoint, "write", write_late)
    world = await build("beside")
    checkpoints = world.folder / "checkpoints"
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        processor = world.processor(channel, worker)
        tasks = [asyncio.create_task(worker.run()), asyncio.create_task(processor.run())]

        async def is_next_checkpoint_due() -> bool:
            return worker.learner.step == STEPS and worker.doing == "checkpoint"

        await eventually(is_next_checkpoint_due)
        assert find_latest_checkpoint(checkpoints) is None
        stopping = asyncio.create_task(worker.stop())
        may_write.set()
        await stopping
        assert find_latest_checkpoint(checkpoints) == checkpoints / f"global_step_{STEPS}"
        assert (await world.pool.state()).durable == 16
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    first, last = (read_metadata(checkpoints / f"global_step_{step}") for step in (2, STEPS))
    assert (first.batch_ids, last.batch_ids) == ((0, 1), (2, 3))
    assert first.cursor["position"] < last.cursor["position"]


async def test_a_checkpoint_that_cannot_be_written_ends_the_training_with_the_reason(
    build: Callable[[str], Awaitable[World]],
) -> None:
    world = await build("refused")
    (world.folder / "checkpoints/global_step_2").mkdir(parents=True)
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        processing = asyncio.create_task(world.processor(channel, worker).run())
        with pytest.raises(AlreadyExistsError, match="global_step_2 exists"):
            await worker.run()
        processing.cancel()
        await asyncio.wait([processing])
    assert (await world.pool.state()).durable == 0


async def test_a_write_that_fails_beside_the_training_ends_it_before_the_next_checkpoint(
    build: Callable[[str], Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(held: HeldCheckpoint) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(HeldCheckpoint, "write", full)
    world = await build("full")
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        processing = asyncio.create_task(world.processor(channel, worker).run())
        with pytest.raises(OSError, match="no space left"):
            await worker.run()
        processing.cancel()
        await asyncio.wait([processing])
        assert worker.learner.step < 4  # checkpoints are due after 2 and 4 steps
    assert (await world.pool.state()).durable == 0


async def test_a_checkpoint_that_its_caller_gives_up_is_written_and_the_next_one_waits_for_it(
    build: Callable[[str], Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await build("given-up")
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        is_held, may_go_on = threading.Event(), threading.Event()

        def slow_hold(folder: Path) -> HeldState:
            is_held.set()
            assert may_go_on.wait(LIMIT_SECONDS)
            return type(worker.learner).hold_state(worker.learner, folder)

        monkeypatch.setattr(worker.learner, "hold_state", slow_hold)
        given_up = asyncio.create_task(worker.save_checkpoint())
        await asyncio.to_thread(is_held.wait, LIMIT_SECONDS)
        given_up.cancel()
        second = asyncio.create_task(worker.save_checkpoint())
        may_go_on.set()
        path = await second
    assert given_up.cancelled()
    check_files(path)


async def test_a_trainer_that_was_replaced_ends_and_saves_nothing(build: Callable[[str], Awaitable[World]]) -> None:
    world = await build("replaced")
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        assert isinstance(worker.learner, RecordingLearner)
        worker.learner.gate.clear()
        processor = world.processor(channel, worker)
        tasks = [asyncio.create_task(worker.run()), asyncio.create_task(processor.run())]
        await asyncio.to_thread(worker.learner.is_training.wait, LIMIT_SECONDS)
        await world.pool.resume()
        worker.learner.gate.set()
        with pytest.raises(LeaseLostError, match="the ledger disagrees with this trainer after 1 steps"):
            await tasks[0]
        await worker.stop()
        tasks[1].cancel()
        await asyncio.wait(tasks)
    assert find_latest_checkpoint(world.folder / "checkpoints") is None


async def test_a_trainer_that_was_replaced_between_two_steps_saves_nothing_either(
    build: Callable[[str], Awaitable[World]],
) -> None:
    world = await build("waiting")
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        training = asyncio.create_task(worker.run())
        await worker.has_begun.wait()
        await world.pool.resume()
        with pytest.raises(LeaseLostError):
            await training
        await worker.stop()
    assert find_latest_checkpoint(world.folder / "checkpoints") is None


def batch() -> TrainBatch:
    sequences = [TrainSequence([4, 5, 6], [False, True, True], [0.0, -2.0, -2.0], sign) for sign in (1.0, -1.0)]
    return TrainBatch.pack(sequences)


@pytest.mark.guide("A3", "J11")
async def test_training_is_a_service_once_the_loop_has_ended(build: Callable[[str], Awaitable[World]]) -> None:
    world = await build("service")
    worker = await world.live()
    assert worker is not None
    tensors = encode_train_batch(batch())

    async def start(process: ServiceProcess) -> None:
        worker._pool = world.worker(process.connect(world.pool.address))._pool
        process.add(add_TrainerServiceServicer_to_server, TrainerServicer(worker), "nexrl.v1.TrainerService")

    async with running_service(world.folder, start) as process, connect(process.address) as channel:
        trainer: TrainerServiceAsyncStub = TrainerServiceStub(channel)

        async def ask(method: Callable[..., Any], request: object) -> Any:
            return await call(method, request, timeout_seconds=LIMIT_SECONDS)

        logprobs = decode_tensor("x", (await ask(trainer.Forward, pb.ForwardRequest(tensors=tensors))).logprobs)
        assert logprobs.shape == (6,)
        assert (logprobs < 0).tolist() == [False, True, True] * 2

        accumulate = pb.ForwardBackwardRequest(request_id="f", tensors=tensors)
        first = await ask(trainer.ForwardBackward, accumulate)
        assert await ask(trainer.ForwardBackward, accumulate) == first
        update = pb.OptimizerStepRequest(request_id="o")
        for _ in range(2):  # a repeated call is one step
            assert (await ask(trainer.OptimizerStep, update)).policy_version == STEPS + 1
        state = await ask(trainer.GetTrainerState, pb.GetTrainerStateRequest())
        assert (state.policy_version, state.total_steps, state.activity) == (STEPS + 1, STEPS, "idle")

        saved = (await ask(trainer.SaveCheckpoint, pb.SaveCheckpointRequest(request_id="s"))).path
        assert Path(saved).name == f"global_step_{STEPS + 1}"
        after = weights(worker)
        await ask(trainer.ForwardBackward, pb.ForwardBackwardRequest(request_id="g", tensors=tensors))
        await ask(trainer.OptimizerStep, pb.OptimizerStepRequest(request_id="p"))
        assert not all(torch.equal(tensor, weights(worker)[name]) for name, tensor in after.items())
        loaded = await ask(trainer.LoadCheckpoint, pb.LoadCheckpointRequest(request_id="l", path=saved))
        assert loaded.policy_version == STEPS + 1
        assert all(torch.equal(tensor, weights(worker)[name]) for name, tensor in after.items())
        published = await ask(trainer.PublishWeights, pb.PublishWeightsRequest(request_id="w"))
        assert published.policy_version == STEPS + 1

        for path in ("/nowhere", "x" * 500, "\0"):
            with pytest.raises(NotFoundError, match="is not a complete checkpoint"):
                await ask(trainer.LoadCheckpoint, pb.LoadCheckpointRequest(request_id="m", path=path))
        with pytest.raises(InvalidArgumentError, match="tensors: missing"):
            await ask(trainer.Forward, pb.ForwardRequest())
        for token_id in (-1, 10**6):
            foreign = TrainBatch.pack([TrainSequence([4, token_id], [False, True], [0.0, -2.0], 1.0)])
            with pytest.raises(InvalidArgumentError, match=f"token_ids: {token_id}; must be from 0 to"):
                await ask(trainer.Forward, pb.ForwardRequest(tensors=encode_train_batch(foreign)))


async def test_calls_that_change_weights_are_refused_while_the_loop_trains(
    build: Callable[[str], Awaitable[World]],
) -> None:
    world = await build("training")

    async def start(process: ServiceProcess) -> None:
        worker = world.worker(process.connect(world.pool.address))
        process.add(add_TrainerServiceServicer_to_server, TrainerServicer(worker), "nexrl.v1.TrainerService")
        process.spawn(worker.run())

    async with running_service(world.folder, start) as process, connect(process.address) as channel:
        trainer: TrainerServiceAsyncStub = TrainerServiceStub(channel)
        refused: list[tuple[Callable[..., Any], object]] = [
            (trainer.ForwardBackward, pb.ForwardBackwardRequest(request_id="f", tensors=encode_train_batch(batch()))),
            (trainer.OptimizerStep, pb.OptimizerStepRequest(request_id="o")),
            (trainer.SaveCheckpoint, pb.SaveCheckpointRequest(request_id="s")),
            (trainer.LoadCheckpoint, pb.LoadCheckpointRequest(request_id="l")),
            (trainer.PublishWeights, pb.PublishWeightsRequest(request_id="w")),
        ]
        for method, request in refused:
            with pytest.raises(FailedPreconditionError, match="own loop is training"):
                await call(method, request, timeout_seconds=LIMIT_SECONDS)
        forward = pb.ForwardRequest(tensors=encode_train_batch(batch()))
        answer = await call(trainer.Forward, forward, timeout_seconds=LIMIT_SECONDS)
        assert np.isfinite(decode_tensor("x", answer.logprobs)).all()
