"""Reads the tasks of one purpose from the data reader, some ahead, and keeps the newest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nexrl.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
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
MAX_KEPT = 8192


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

    @classmethod
    async def open(cls, stub: "DataReaderServiceAsyncStub", purpose: "Purpose.ValueType") -> "TaskReader":
        """Wait until the data reader has read its data. Raises UnavailableError after START_SECONDS."""
        sizes = await call(stub.ReadTasks, pb.ReadTasksRequest(purpose=purpose), timeout_seconds=START_SECONDS)
        return cls(stub, purpose, sizes.items, None if sizes.total < 0 else sizes.total)

    async def task(self, position: int) -> Task:
        """Return the task at `position` of the sequence of all epochs. Raises the errors of `_read`."""
        if position not in self._kept:
            request = pb.ReadTasksRequest(purpose=self._purpose, cursor=position, count=READ_AHEAD)
            for ahead, task in enumerate(await self._read(request)):
                self._kept[position + ahead] = task
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[position]

    async def task_in_source_order(self, index: int) -> Task:
        """Return the task at `index` in the order of the source. Raises the errors of `_read`."""
        request = pb.ReadTasksRequest(purpose=self._purpose, cursor=index, count=1, in_source_order=True)
        return (await self._read(request))[0]

    async def _read(self, request: pb.ReadTasksRequest) -> Sequence[Task]:
        """Raises UnavailableError if the data reader does not answer, FailedPreconditionError if its data changed."""
        try:
            answer = await call(self._stub.ReadTasks, request, timeout_seconds=READ_SECONDS)
        except DeadlineExceededError as error:
            raise UnavailableError(f"the data reader does not answer: {error}") from error
        if answer.items != self.items:
            raise FailedPreconditionError(
                f"the data has {answer.items} tasks and had {self.items}; data must be the same each time it is read"
            )
        return answer.tasks
