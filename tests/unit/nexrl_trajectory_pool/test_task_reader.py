"""How the pool reads tasks: in few calls, all at once."""

import asyncio
from typing import Any

import pytest

from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.trajectory_pb2 import PURPOSE_TRAINING, Task
from nexrl_trajectory_pool import task_reader
from nexrl_trajectory_pool.task_reader import TaskReader

TASKS = 1000
TASKS_PER_ANSWER = 5


class FakeReader:
    """A data reader that answers calls for tasks only once `wanted` of them wait."""

    def __init__(self, wanted: int) -> None:
        self.cursors: list[int] = []
        self._together = asyncio.Barrier(wanted)

    async def ReadTasks(self, request: pb.ReadTasksRequest, **_: float) -> pb.ReadTasksResponse:
        if request.count:
            self.cursors.append(request.cursor)
            await self._together.wait()
        positions = range(request.cursor, request.cursor + min(request.count, TASKS_PER_ANSWER))
        return pb.ReadTasksResponse(
            items=TASKS, total=-1, tasks=[Task(task_id=f"{position}") for position in positions]
        )


async def test_missing_tasks_are_read_at_once_and_those_near_each_other_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_reader, "READ_AHEAD", TASKS_PER_ANSWER)
    fake: Any = FakeReader(wanted=3)
    reader = await TaskReader.open(fake, PURPOSE_TRAINING)
    positions = [700, 41, 40, 300, 44]
    assert [task.task_id for task in await reader.tasks(positions)] == ["700", "41", "40", "300", "44"]
    assert sorted(fake.cursors) == [40, 300, 700]
    await reader.tasks([43, 300])  # read ahead, and kept
    assert len(fake.cursors) == 3


async def test_tasks_beyond_an_answer_that_ended_early_are_read_by_another_call() -> None:
    fake: Any = FakeReader(wanted=1)
    reader = await TaskReader.open(fake, PURPOSE_TRAINING)
    assert [task.task_id for task in await reader.tasks([0, 9])] == ["0", "9"]
    assert fake.cursors == [0, 9]
