"""Starts `nexrl run` in a process, as a user does. Follows it through the controller's RPCs and through /proc.

Each run has its own working directory, which its child processes inherit. So all processes of a run can be found by
their working directory, even after the launcher has ended.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nexrl import parent_death
from nexrl.local.launcher import controller_address
from nexrl.rpc.client import call, connect, watch
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.trajectory_pool_service_pb2 import BatchLease
from tests.support.patience import LIMIT_SECONDS, eventually

NEXRL = (sys.executable, "-m", "nexrl.cli")
NAME = "copy-digits"
FILES = Path(__file__).parents[1] / "e2e"
EXPERIMENT, TASKS = "copy-digits.yaml", "copy_digits.py"
LOG_CHARACTERS = 3000
OUTPUT = "output"
"""File with what `nexrl run` printed."""

ResultT = TypeVar("ResultT")


class Process(NamedTuple):
    """One process. `began`, in clock ticks since boot, distinguishes it from a later process with the same id."""

    pid: int
    began: int


@dataclass(frozen=True)
class Run:
    """A started `nexrl run`."""

    root: Path
    """The working directory, which contains the experiment's files and the run's folder."""
    launcher: asyncio.subprocess.Process

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.root / NAME

    def hold(self) -> None:
        """Pause the run at the next sample that it scores. All its processes stay alive."""
        (self.root / "hold").touch()

    def release(self) -> None:
        """Let the paused run continue."""
        (self.root / "hold").unlink()

    @property
    def processes(self) -> dict[str, Process]:
        """The run's processes by name, for example 'rollout-0' or 'trainer-rank-1'. The private Redis is 'redis'."""
        return {name: process for name, process in processes_in(self.root).items() if process.pid != self.launcher.pid}

    async def process(self, name: str, *, other_than: Process | None = None) -> Process:
        """Wait until the child `name` runs, and return it. Ignores `other_than`, the process that ran before."""
        # The first match is kept: during `exec`, a process may be invisible at a second look.
        found: list[Process] = []

        def is_there() -> bool:
            seen = self.processes.get(name)
            if seen is None or seen == other_than:
                return False
            found.append(seen)
            return True

        await self._unless_ended(eventually(is_there, f"{name} runs"))
        return found[0]

    async def until(self, is_met: Callable[[pb.Experiment], bool]) -> pb.Experiment:
        """Wait until `is_met` holds for the experiment, and return the experiment. Fails if the run ends before."""
        return await self._unless_ended(self._until(is_met))

    async def until_step(self, step: int) -> int:
        """Wait until at least `step` optimizer steps were made. Returns their number. Fails if the run ends before."""
        return (await self.until(lambda experiment: experiment.progress.step >= step)).progress.step

    async def ends(self, code: int = 0) -> None:
        """Wait until the run ends. Fails with its last words unless its exit code is `code`."""
        ended = await self.launcher.wait()
        assert ended == code, (
            f"exit code {ended}: {(self.root / OUTPUT).read_bytes()[-LOG_CHARACTERS:].decode(errors='replace')}"
        )

    async def activity(self) -> activity_pb.GetActivityResponse:
        """Return the activity of the run's modules."""
        async with connect(controller_address(self.folder)) as channel:
            request = activity_pb.GetActivityRequest()
            return await call(ActivityServiceStub(channel).GetActivity, request, timeout_seconds=LIMIT_SECONDS)

    async def _until(self, is_met: Callable[[pb.Experiment], bool]) -> pb.Experiment:
        await eventually((self.folder / "endpoints.json").exists, "the run has addresses")
        async with connect(controller_address(self.folder)) as channel:
            async for message in watch(ControllerServiceStub(channel).WatchExperiment, pb.WatchExperimentRequest()):
                if is_met(message.experiment):
                    return message.experiment
        raise AssertionError("a watch has no end")

    async def _unless_ended(self, wanted: Coroutine[Any, Any, ResultT]) -> ResultT:
        tasks = asyncio.create_task(wanted), asyncio.create_task(self.launcher.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert tasks[0].done(), f"the run ended before, with code {self.launcher.returncode}"
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running(root: Path, *overrides: str, file: Path = FILES / EXPERIMENT) -> AsyncIterator[Run]:
    """Run `nexrl run` of `file` in `root` during a block. The limit is that of the test. Kills the run after the block.

    Fails if a process is left behind. Prints the logs if the block fails.
    """
    experiment = copy_experiment(root, file)
    (root / NAME / "endpoints.json").unlink(missing_ok=True)  # an earlier run's file names a dead controller
    output = root / OUTPUT
    with output.open("wb") as written:
        launcher = await asyncio.create_subprocess_exec(
            # The run ends with this process: a killed test must leave no run behind.
            *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
            *(*NEXRL, "run", str(experiment), "--root", str(root), *overrides),
            cwd=root,
            stdout=written,
            stderr=written,
        )
    run = Run(root, launcher)
    try:
        yield run
    except BaseException:
        _print_logs(run, output)
        raise
    finally:
        if launcher.returncode is None:
            launcher.kill()
            await launcher.wait()
        await until_gone(root)


def copy_experiment(root: Path, file: Path = FILES / EXPERIMENT) -> Path:
    """Copy the experiment `file` and its tasks to `root`. Returns the path of the copy."""
    shutil.copy(FILES / TASKS, root)
    return Path(shutil.copy(file, root))


def nexrl(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a `nexrl` command in `root`. It must end, with success or with an error."""
    command = [*NEXRL, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


async def until_gone(root: Path) -> None:
    """Wait until no process runs whose working directory is `root` or below it."""
    await eventually(lambda: not processes_in(root), f"no process is left in {root}")


def processes_in(folder: Path) -> dict[str, Process]:
    """Return the living processes, by name, whose working directory is `folder` or below it."""
    return {_name(process.pid): process for process in _processes_in(folder.resolve())}


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Return the lines of the run's metrics.jsonl in the order of writing."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def batches_of(run: Path) -> list[BatchLease]:
    """Return the batches that a run prepared for training, in order."""
    return [BatchLease.FromString(path.read_bytes()) for path in sorted((run / "trajectories").glob("batch_*.pb"))]


def _processes_in(folder: Path) -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):  # a zombie has no cwd
                stat = (entry / "stat").read_text()
                yield Process(int(entry.name), int(stat.rpartition(")")[2].split()[19]))  # field 22 of proc(5)
        except (OSError, ValueError):
            continue  # the process has just ended, or belongs to another user


def _name(pid: int) -> str:
    try:
        environment = dict(line.partition(b"=")[::2] for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return f"ended {pid}"
    if "redis-server" in command:
        return "redis"
    return environment.get(b"NEXRL_INSTANCE", f"{pid} {command}".encode()).decode()


def _print_logs(run: Run, output: Path) -> None:
    for path in [output, *sorted(run.folder.glob("logs/*.log"))]:
        sys.stdout.write(f"--- {path.name}\n{path.read_bytes()[-LOG_CHARACTERS:].decode(errors='replace')}\n")
