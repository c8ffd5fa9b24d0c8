"""Reads the tasks of one purpose from the data reader, some ahead, and keeps the newest."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nexrl.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NexrlError,
    UnavailableError,
)
from nexrl.rpc.client import call
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION, Task

if TYPE_CHECKING:
    from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceAsyncStub
    from nexrl.v1.trajectory_pb2 import Purpose

START_SECONDS = 2700.0
"""Longest time for the data reader to read its data."""
READ_SECONDS = 15.0
"""Longest time for the data reader to answer, also while it is restarted. Below the deadline of LeaseTasks."""
READ_AHEAD = 256
MAX_KEPT_CHARACTERS = 64 * 2**20


class TaskReader:
    """The tasks of one purpose.

    `items` are the tasks in one epoch, `total` those in all epochs (None if there is no limit). `data` is the same text
    each time that the same data is read.
    """

    def __init__(
        self, stub: "DataReaderServiceAsyncStub", purpose: "Purpose.ValueType", sizes: pb.ReadTasksResponse
    ) -> None:
        self.items = sizes.items
        self.total = None if sizes.total < 0 else sizes.total
        self.data = _data(sizes)
        is_validation = purpose == PURPOSE_VALIDATION
        self._source = "spec.validation.data" if is_validation else "spec.data, or spec.validation with heldOut"
        self._stub = stub
        self._purpose = purpose
        self._kept: dict[int, Task] = {}
        self._kept_characters = 0
        self._is_answering = True

    @classmethod
    async def open(cls, stub: "DataReaderServiceAsyncStub", purpose: "Purpose.ValueType") -> "TaskReader":
        """Wait until the data reader has read its data. Raises UnavailableError after START_SECONDS."""
        sizes = await call(stub.ReadTasks, pb.ReadTasksRequest(purpose=purpose), timeout_seconds=START_SECONDS)
        return cls(stub, purpose, sizes)

    async def tasks(self, positions: Sequence[int]) -> Sequence[Task]:
        """Return the tasks at these positions of the sequence of all epochs. Raises the errors of `_read`.

        All calls that are needed are made at once. An answer may end early, so there may be more than one round.
        """
        found = {position: self._kept[position] for position in positions if position in self._kept}
        while missing := set(positions) - found.keys():
            for tasks in await asyncio.gather(*map(self._read_from, _cursors(missing))):
                found |= tasks
        return [found[position] for position in positions]

    async def _read_from(self, cursor: int) -> dict[int, Task]:
        """Read up to READ_AHEAD tasks, at least one, and keep them. Returns them by position."""
        request = pb.ReadTasksRequest(purpose=self._purpose, cursor=cursor, count=READ_AHEAD)
        tasks = dict(enumerate(await self._read(request), start=cursor))
        for position, task in tasks.items():
            self._keep(position, task)
        return tasks

    def require_same(self, before: str) -> None:
        """Raise InvalidArgumentError if `data` was `before` when this experiment began."""
        if self.data != before:
            raise InvalidArgumentError(self._changed(self.data, before))

    def _changed(self, now: str, before: str) -> str:
        return (
            f"{self._source}: the data has changed: it has {now} and had {before}. Data must be the same each time it "
            "is read: the ledger knows a task by its position. Restore it, or choose another metadata.name for an "
            "experiment with the new data"
        )

    async def check(self) -> None:
        """Raise the errors of `_read` if the data reader did not answer the newest call and does not answer now.

        Called before samples are granted: samples whose tasks cannot be read are lost to their leases.
        """
        if not self._is_answering:
            await self._read(pb.ReadTasksRequest(purpose=self._purpose))

    def _keep(self, position: int, task: Task) -> None:
        """Keep a task, and forget the oldest ones that are too much. Several calls may read the same tasks."""
        if position not in self._kept:
            self._kept_characters += len(task.item_json)
        self._kept[position] = task
        while self._kept_characters > MAX_KEPT_CHARACTERS and len(self._kept) > 1:
            self._kept_characters -= len(self._kept.pop(next(iter(self._kept))).item_json)

    async def task_in_source_order(self, index: int) -> Task:
        """Return the task at `index` in the order of the source. Raises the errors of `_read`."""
        request = pb.ReadTasksRequest(purpose=self._purpose, cursor=index, count=1, in_source_order=True)
        return (await self._read(request))[0]

    async def _read(self, request: pb.ReadTasksRequest) -> Sequence[Task]:
        """Raises UnavailableError if the data reader does not answer, FailedPreconditionError if its data changed."""
        try:
            answer = await call(self._stub.ReadTasks, request, timeout_seconds=READ_SECONDS)
        except NexrlError as error:
            self._is_answering = False
            if isinstance(error, DeadlineExceededError):
                raise UnavailableError(f"the data reader does not answer: {error}") from error
            raise
        now = _data(answer)
        self._is_answering = now == self.data
        if now != self.data:
            raise FailedPreconditionError(self._changed(now, self.data))
        return answer.tasks


def _data(answer: pb.ReadTasksResponse) -> str:
    return f"{answer.items} tasks with digest {answer.digest.hex()}"


def _cursors(positions: Iterable[int]) -> Sequence[int]:
    """Return the fewest cursors from which READ_AHEAD tasks each include all positions."""
    cursors: list[int] = []
    for position in sorted(positions):
        if not cursors or position >= cursors[-1] + READ_AHEAD:
            cursors.append(position)
    return cursors
