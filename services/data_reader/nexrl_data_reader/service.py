"""nexrl.v1.DataReaderService: finds tasks by their position and turns them into messages."""

import asyncio
import hashlib
import json
from typing import Any

import grpc

from nexrl.datasets import Datasets, Task, TaskSource
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceServicer
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION
from nexrl.v1.trajectory_pb2 import Task as TaskMessage
from nexrl_data_reader.probability import Probability

MAX_COUNT = 4096
MAX_ANSWER_BYTES = 4 * 2**20
"""An answer has at least one task, whatever its size."""

FUNCTION_SECONDS = 10.0
"""Longest time for the calls of a user's function for one draw. The pool waits longer, so that it gets the reason."""

Context = grpc.aio.ServicerContext[Any, Any]


class DataReaderServicer(DataReaderServiceServicer):
    """nexrl.v1.DataReaderService."""

    def __init__(self, datasets: Datasets, probability: Probability | None = None) -> None:
        """Takes a while for large data: 100,000 short tasks take half a second on an idle core, less than reading."""
        self._datasets = datasets
        self._probability = probability
        self._by_id = {task["id"]: task for task in datasets.train.tasks} if probability else {}
        self._digests = [_digest(source) if source else b"" for source in datasets]

    async def ReadTasks(self, request: pb.ReadTasksRequest, context: Context) -> pb.ReadTasksResponse:
        index = int(request.purpose == PURPOSE_VALIDATION)
        source = self._datasets[index]
        if source is None:
            raise NotFoundError("purpose: VALIDATION: the experiment has no section validation")
        if not 0 <= request.count <= MAX_COUNT:
            raise InvalidArgumentError(f"count: {request.count}; 0 to {MAX_COUNT}")
        end = len(source) if request.in_source_order else source.total
        if request.count and not (request.cursor >= 0 and (end is None or request.cursor < end)):
            raise NotFoundError(f"cursor: {request.cursor}; 0 to {'any' if end is None else end - 1}")
        total = -1 if source.total is None else source.total
        response = pb.ReadTasksResponse(items=len(source), total=total, digest=self._digests[index])
        last = request.cursor + request.count
        size_bytes = 0
        for position in range(request.cursor, last if end is None else min(last, end)):
            item = json.dumps(task := _task(source, position, in_source_order=request.in_source_order))
            size_bytes += len(item)
            if response.tasks and size_bytes > MAX_ANSWER_BYTES:
                break
            response.tasks.append(TaskMessage(task_id=task["id"], item_json=item))
        return response

    async def GetProbabilities(
        self, request: pb.GetProbabilitiesRequest, context: Context
    ) -> pb.GetProbabilitiesResponse:
        probability = self._probability
        if probability is None:
            raise FailedPreconditionError("the experiment has no data.sampler of type python")
        if len(request.tasks) > MAX_COUNT:
            raise InvalidArgumentError(f"tasks: {len(request.tasks)}; at most {MAX_COUNT}")
        unknown = [task.task_id for task in request.tasks if task.task_id not in self._by_id]
        if unknown:
            raise NotFoundError(f"tasks.task_id: {unknown[0]!r} is no task of the training data")
        known = [
            (self._by_id[task.task_id], task.reward if task.HasField("reward") else None) for task in request.tasks
        ]
        try:
            async with asyncio.timeout(FUNCTION_SECONDS):
                # In a thread: a function that never returns must not keep tasks from being read.
                probabilities = await asyncio.to_thread(lambda: [probability(*task) for task in known])
        except TimeoutError:
            late = f"{probability.newest_call} had not returned within {FUNCTION_SECONDS:g} s of the draw's first call"
            raise FailedPreconditionError(late) from None
        return pb.GetProbabilitiesResponse(probabilities=probabilities)


def _task(source: TaskSource, position: int, *, in_source_order: bool) -> Task:
    return source.tasks[position] if in_source_order else source.task(*source.locate(position))


def _digest(source: TaskSource) -> bytes:
    """Return 16 bytes that depend on the tasks, their order in the source, and the order in which they are granted.

    This finds mistakes. It is no protection against data that is made to have the same digest.
    """
    granted_in = json.dumps({"seed": source.seed} if source.shuffle else None)
    digest = hashlib.blake2b(granted_in.encode(), digest_size=16)
    for task in source.tasks:
        digest.update(json.dumps(task, sort_keys=True).encode())
    return digest.digest()
