"""Reads the tasks of one purpose from the data reader, some ahead, and keeps the newest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nexrl.errors import DeadlineExceededError, FailedPreconditionError, NexrlError, UnavailableError
from nexrl.rpc.client import call
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.trajectory_pb2 import Task

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
    """The tasks of one purpose. `items` in one epoch, `total` in all epochs; None if there is no limit."""

    def __init__(
        self, stub: "DataReaderServiceAsyncStub", purpose: "Purpose.ValueType", items: int, total: int | None
    ) -> None:
        self.items = items
        self.total = total
        self._stub = stub
        self._purpose = purpose
        self._kept: dict[int, Task] = {}
        self._kept_characters = 0
        self._is_answering = True

    @classmethod
    async def open(cls, stub: "DataReaderServiceAsyncStub", purpose: "Purpose.ValueType") -> "TaskReader":
        """Wait until the data reader has read its data. Raises UnavailableError after START_SECONDS."""
        sizes = await call(stub.ReadTasks, pb.ReadTasksRequest(purpose=purpose), timeout_seconds=START_SECONDS)
        return cls(stub, purpose, sizes.items, None if sizes.total < 0 else sizes.total)

    async def task(self, position: int) -> Task:
        """Return the task at `position` of the sequence of all epochs. Raises the errors of `_read`."""
        if position not in self._kept:
            request = pb.ReadTasksRequest(purpose=self._purpose, cursor=position, count=READ_AHEAD)
            tasks = await self._read(request)
            for ahead, task in enumerate(tasks):
                self._keep(position + ahead, task)
            return tasks[0]
        return self._kept[position]

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
        self._is_answering = answer.items == self.items
        if answer.items != self.items:
            raise FailedPreconditionError(
                f"the data has {answer.items} tasks and had {self.items}; data must be the same each time it is read"
            )
        return answer.tasks
