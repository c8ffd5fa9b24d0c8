"""A run of the trainer against the real pool: its steps, its checkpoints, and where it resumes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from nexrl.activity import ActivityTracker
from nexrl.errors import InvalidArgumentError
from nexrl.rpc.client import connect
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from tests.support.patience import LIMIT_SECONDS
from tests.support.training import KillAt, World, building_worlds


class RecordingTracker(ActivityTracker):
    """Keeps the name of everything that was ever in flight."""

    def __init__(self, module: activity_pb.Module, channel: grpc.aio.Channel | None) -> None:
        super().__init__(module, channel)
        self.tracked: set[str] = set()
        self.posted: list[int] = []

    @contextlib.contextmanager
    def track(self, activity: str, waiting_on: str = "") -> Iterator[None]:
        self.tracked.add(activity)
        with super().track(activity, waiting_on):
            yield

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.posted.append(step)


@pytest.fixture
async def build(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    """Builds worlds of their own folder and ledger."""
    async with building_worlds(tmp_path, redis_url, experiment_name) as start:
        yield start


def checkpoints_of(world: World) -> set[str]:
    return {path.name for path in (world.folder / "checkpoints").iterdir()}


@pytest.mark.guide("D7", "J5", "J7", "J9", "J13", "L4", "L7", "L16", "L17", "Q19", "Q23")
async def test_a_run_publishes_every_version_and_saves_every_second_step(
    build: Callable[..., Awaitable[World]],
) -> None:
    world = await build("plain")
    world.activity = tracker = RecordingTracker(activity_pb.Module(name="trainer"), None)
    async with asyncio.timeout(LIMIT_SECONDS):
        assert await world.live() is not None
    assert world.publisher.published == [0, 1, 2, 3, 4]
    assert [step for step, _ in world.made] == [0, 1, 2, 3]
    assert checkpoints_of(world) == {"global_step_2", "global_step_4"}
    assert {"wait_batch", "train", "publish", "checkpoint"} <= tracker.tracked
    state = await world.pool.state()
    assert (state.trained, state.durable, state.imbalance) == (16, 16, 0)


@pytest.mark.guide("Q24")
async def test_a_run_keeps_as_many_checkpoints_as_the_experiment_says(
    build: Callable[..., Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl_trainer.checkpoint.SETTLED_SECONDS", -1.0)  # none is kept for its youth
    world = await build("kept", checkpoint={"everySteps": 1, "keep": 2})
    assert await world.live() is not None
    assert checkpoints_of(world) == {"global_step_3", "global_step_4"}


@pytest.mark.guide("D8", "L18", "Q42")
async def test_a_run_goes_on_from_the_checkpoint_that_it_names(build: Callable[..., Awaitable[World]]) -> None:
    first = await build("first")
    assert await first.live() is not None
    named = first.folder / "checkpoints/global_step_2"
    second = await build("second", resume={"mode": "from_path", "path": str(named)})
    second.activity = tracker = RecordingTracker(activity_pb.Module(name="trainer"), None)
    assert await second.live() is not None
    assert tracker.posted[:2] == [2, 3]  # status shows at once where it goes on
    assert second.publisher.published == [2, 3, 4]
    assert [step for step, _ in second.made] == [2, 3]
    assert checkpoints_of(second) == {"global_step_4"}


@pytest.mark.guide("I2", "I3", "I4", "I5")
async def test_the_processor_takes_batches_from_one_pool_to_the_other_and_tracks_its_work(
    build: Callable[..., Awaitable[World]],
) -> None:
    world = await build("processor")
    world.activity = tracker = RecordingTracker(activity_pb.Module(name="trainer"), None)
    incarnation = (await world.pool.resume()).incarnation
    async with connect(world.pool.address) as channel:
        processor = world.processor(channel, world.worker(channel))
        processing = asyncio.create_task(processor.run())
        answer = await world.pool.lease_train_batch(0, incarnation, wait_seconds=10)
        processing.cancel()
        await asyncio.wait([processing])
    assert processing.cancelled()
    assert (answer.train_batch.batch_id, len(answer.train_batch.sample_ids)) == (0, 4)
    assert tracker.tracked == {"wait_batch", "process_batch"}


class KillAtCommit(KillAt):
    """Simulates a kill when the trainer has written a checkpoint, and the ledger has not committed it yet."""

    def __init__(self, steps: int) -> None:
        super().__init__(1, is_seen=False)
        self._steps = steps

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        is_commit = isinstance(request, train_pb.CommitCheckpointRequest) and request.steps == self._steps
        if is_commit or self._left < 1:
            return await super().intercept_unary_unary(continuation, client_call_details, request)
        return await continuation(client_call_details, request)


def flip_a_bit(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


async def test_the_steps_of_a_damaged_checkpoint_are_made_again_unless_the_ledger_has_committed_it(
    build: Callable[..., Awaitable[World]],
) -> None:
    whole, world = await build("undamaged"), await build("damaged")
    assert await whole.live() is not None
    assert await world.live(KillAtCommit(4)) is None
    newest = world.folder / "checkpoints/global_step_4"
    written = (newest / "model.safetensors").read_bytes()
    flip_a_bit(newest)
    (world.folder / "checkpoints/global_step_3.abandoned.tmp").mkdir()
    assert await world.live() is not None
    assert [step for step, _ in world.made] == [0, 1, 2, 3, 2, 3]
    assert all(dict(whole.made)[step] == batch for step, batch in world.made)
    assert (newest / "model.safetensors").read_bytes() == written
    assert checkpoints_of(world) == {"global_step_2", "global_step_4", "global_step_4.unusable"}
    state = await world.pool.state()
    assert (state.trained, state.durable, state.imbalance) == (16, 16, 0)

    flip_a_bit(newest)
    async with connect(world.pool.address) as channel:
        with pytest.raises(InvalidArgumentError, match="continues from 4 to 4 steps"):
            await world.worker(channel).run()
    assert checkpoints_of(world) == {"global_step_2", "global_step_4", "global_step_4.unusable"}
