"""One child process of the launcher, with its own log."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nexrl import bound

TAIL_BYTES = 4096
TAIL_LINES = 5


@dataclass(frozen=True)
class Command:
    """What to start: `name` as 'rollout-0', the command line, and what it finds in its environment besides ours."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


class Child:
    """Starts a command again and again under one name. It ends with the launcher, also when that is killed."""

    def __init__(self, command: Command, logs: Path) -> None:
        self.command = command
        self.log = logs / f"{command.name}.log"
        self.starts = 0
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
        """Start it and wait for its end; gives the exit code, negative for a signal."""
        async with self._spawning:
            self._process = await self._spawn()
        self.starts += 1
        return await self._process.wait()

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL when it has not ended within `grace_seconds`."""
        async with self._spawning:  # one that is just being started is to end, too
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

    def log_tail(self) -> str:
        """The last lines of its log."""
        if not self.log.exists():
            return ""
        content = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return "\n".join(content.strip().splitlines()[-TAIL_LINES:])

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", bound.__file__, str(os.getpid())),
                *self.command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.command.environment},
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops the children in order
            )
