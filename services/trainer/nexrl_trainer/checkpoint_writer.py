"""Writes checkpoints beside the training, one at a time."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import Gauge

from nexrl.activity import ActivityTracker

WRITE_SECONDS = Gauge(
    "nexrl_trainer_checkpoint_write_seconds", "Seconds from the copy of the last checkpoint to its commit."
)
NICE = 10
"""Added to the priority of the writing thread: it uses the time of the CPU that training leaves."""


class CheckpointWriter:
    """Writes a checkpoint in a thread of its own, and then commits it. Methods must be called in the event loop."""

    def __init__(self, activity: ActivityTracker) -> None:
        self._activity = activity
        self._thread = writing_thread()
        self._writing: asyncio.Task[None] | None = None

    def begin(self, write: Callable[[], object], commit: Callable[[], Awaitable[None]]) -> None:
        """Start to run `write` in the thread, and `commit` after it. The checkpoint before must be finished."""
        assert self._writing is None
        self._writing = asyncio.create_task(self._write(write, commit))

    async def finish(self) -> None:
        """Wait until the checkpoint is committed. Raises the error that stopped it; the next one may be begun then."""
        if (writing := self._writing) is not None:
            await asyncio.wait({writing})  # if this is cancelled, the writing goes on
            self._writing = None
            writing.result()

    def check(self) -> None:
        """Raise the error that stopped the checkpoint that is being written, if there is one."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def _write(self, write: Callable[[], object], commit: Callable[[], Awaitable[None]]) -> None:
        with self._activity.track("write_checkpoint"), WRITE_SECONDS.time():
            await asyncio.get_running_loop().run_in_executor(self._thread, write)
            await commit()


def writing_thread() -> ThreadPoolExecutor:
    """Return a thread of low priority, which writes the checkpoints of this rank."""
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_be_nice)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux, the priority is that of the thread
