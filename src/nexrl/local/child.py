"""A child process of the launcher, with its own log file."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nexrl import parent_death
from nexrl.errors import UnavailableError
from nexrl.json_logging import last_words
from nexrl.kept_log import newest_bytes
from nexrl.settings import REDIS_PASSWORD

TAIL_BYTES = 65_536
"""More than a JSON line with a traceback."""
TAIL_LINES = 5
GANG_END_SECONDS = 30.0
"""Longest time in which the processes of a gang end once one of them has ended."""


@dataclass(frozen=True)
class Command:
    """A command to start: `name` such as 'rollout-0', the command line, and variables added to the environment.

    The child inherits the launcher's variables, except for the password of Redis: user code runs in most of them.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


class Child:
    """One process after the other with the same command and name. It ends with the launcher, even if that is killed."""

    def __init__(self, command: Command, logs: Path) -> None:
        self.command = command
        self.log = logs / f"{command.name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._spawning = asyncio.Lock()

    @property
    def name(self) -> str:
        """Name of the component, as 'rollout-0'."""
        return self.command.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self) -> int:
        """Start the process and wait for its end; returns the exit code, negative for a signal."""
        async with self._spawning:
            process = self._process = await self._spawn()
        code = await process.wait()
        # Code of the user may have forked: what it left behind would hold memory and GPUs, and run forever.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return code

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, then SIGKILL if the process is still running after `grace_seconds`."""
        async with self._spawning:  # a process that is being started must end, too
            process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def last_words(self) -> str:
        """Return why it ended, from the end of its log."""
        content = newest_bytes(self.log, TAIL_BYTES).decode(errors="replace")
        return last_words(content.strip().splitlines()[-TAIL_LINES:])

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
                *self.command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_inherited(), **self.command.environment},
                start_new_session=True,  # Ctrl-C reaches only the launcher, which stops the children in order
            )


async def run_together(gang: Sequence[Child]) -> tuple[Child, int]:
    """Run processes that end together until all have ended. Returns the one that says why, and its exit code.

    They notice each other's end by themselves; one that does not is killed. The first process of a gang leads it, and
    ends with the code of any other, unless it has only lost that one.
    """
    runs = {asyncio.create_task(child.run()): child for child in gang}
    try:
        _, running = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        if running:
            _, running = await asyncio.wait(running, timeout=GANG_END_SECONDS)
        await asyncio.gather(*(runs[run].stop(0) for run in running))
        ended = [(child, await run) for run, child in runs.items()]
    finally:
        for run in runs:
            run.cancel()
    return next(((child, code) for child, code in ended if code not in (0, UnavailableError.exit_code)), ended[0])


def _inherited() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name != REDIS_PASSWORD}
