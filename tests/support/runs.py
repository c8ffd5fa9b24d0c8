"""`nexrl run` as a user starts it: a process of its own, followed through the controller's RPCs and through /proc."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nexrl.local import bound
from nexrl.local.launcher import controller_address
from nexrl.rpc.client import call, connect, watch
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.trajectory_pool_service_pb2 import BatchLease

NEXRL = (sys.executable, "-m", "nexrl.cli")
COPY_DIGITS = Path(__file__).parents[1] / "e2e" / "copy-digits.yaml"
CALL_SECONDS = 30.0
LOOK_SECONDS = 0.02
LOG_CHARACTERS = 3000

ResultT = TypeVar("ResultT")


class Process(NamedTuple):
    """One process of this machine; `began` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    began: int

    @property
    def is_alive(self) -> bool:
        """True while it runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.began == self.began and stat.state not in "ZX"


@dataclass(frozen=True)
class Run:
    """A `nexrl run` that was started."""

    folder: Path
    launcher: asyncio.subprocess.Process
    output: Path
    """What the launcher prints, both streams."""

    def processes(self) -> dict[str, Process]:
        """Its child processes by name, as 'rollout-0'; its private Redis is 'redis'."""
        return {_name(process.pid): process for process in _children(self.launcher.pid)}

    async def process(self, name: str, *, other_than: Process | None = None) -> Process:
        """The child `name`, as soon as it runs; `other_than` is the one that ran before."""
        await self._unless_ended(eventually(lambda: self.processes().get(name, other_than) != other_than))
        return self.processes()[name]

    async def until(self, is_met: Callable[[pb.Experiment], bool]) -> pb.Experiment:
        """The experiment, as soon as `is_met`."""
        return await self._unless_ended(self._until(is_met))

    async def until_step(self, step: int) -> int:
        """The optimizer steps made, as soon as they are at least `step`."""
        return (await self.until(lambda experiment: experiment.progress.step >= step)).progress.step

    async def activity(self) -> activity_pb.GetActivityResponse:
        """What the modules of the run do."""
        async with connect(controller_address(self.folder)) as channel:
            request = activity_pb.GetActivityRequest()
            return await call(ActivityServiceStub(channel).GetActivity, request, timeout_seconds=CALL_SECONDS)

    async def _until(self, is_met: Callable[[pb.Experiment], bool]) -> pb.Experiment:
        await eventually((self.folder / "endpoints.json").exists)
        async with connect(controller_address(self.folder)) as channel:
            async for message in watch(ControllerServiceStub(channel).WatchExperiment, pb.WatchExperimentRequest()):
                if is_met(message.experiment):
                    return message.experiment
        raise AssertionError("a watch has no end")

    async def _unless_ended(self, waiting: Coroutine[Any, Any, ResultT]) -> ResultT:
        waited, ended = asyncio.create_task(waiting), asyncio.create_task(self.launcher.wait())
        try:
            await asyncio.wait({waited, ended}, return_when=asyncio.FIRST_COMPLETED)
            assert waited.done(), f"the run ended first, with code {self.launcher.returncode}"
            return waited.result()
        finally:
            for task in (waited, ended):
                task.cancel()
            await asyncio.gather(waited, ended, return_exceptions=True)


@asynccontextmanager
async def running(folder: Path, *overrides: str, seconds: float, experiment: Path = COPY_DIGITS) -> AsyncIterator[Run]:
    """`nexrl run`, with its runs in `folder`; the block, and the end of the run after it, take at most `seconds`.

    The name of the experiment must be that of its file. Prints the logs when the block fails. No process outlives it.
    """
    run_folder = folder / experiment.stem
    (run_folder / "endpoints.json").unlink(missing_ok=True)  # of the run before: its controller is gone
    output = folder / f"{experiment.stem}.out"
    launcher = await _start(folder, output, ["run", str(experiment), *overrides, "--root", str(folder)])
    run = Run(run_folder, launcher, output)
    seen: dict[str, Process] = {}
    try:
        async with asyncio.timeout(seconds):
            yield run
            seen = run.processes()
            await launcher.wait()
    except BaseException:
        _print_logs(run)
        raise
    finally:
        seen |= run.processes()
        if launcher.returncode is None:
            launcher.kill()
            await launcher.wait()
        await all_gone(seen.values())


async def all_gone(processes: "Iterator[Process] | Any") -> None: ...
