"""Runs a process until the end of a block."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from nexrl.errors import UnavailableError
from nexrl.local.child import Child, Command
from nexrl.rpc.client import connect

START_SECONDS = 300.0
"""Longest time until the process serves. A large model, or a large append-only file, takes long to load."""
STOP_SECONDS = 10.0


@asynccontextmanager
async def running(command: Command, logs: Path, ready: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `command`, and enter the block when `ready` returns.

    Raises UnavailableError, with the end of the log, if the process ends earlier or takes longer than START_SECONDS.
    """
    child = Child(command, logs)
    process, waiting = asyncio.create_task(child.run()), asyncio.create_task(ready)
    try:
        await asyncio.wait((process, waiting), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise UnavailableError(f"{child.name} did not start: {child.last_words()}")
        await waiting
        yield
    finally:
        waiting.cancel()
        await child.stop(STOP_SECONDS)
        process.cancel()
        await asyncio.gather(process, waiting, return_exceptions=True)


@asynccontextmanager
async def serving(command: Command, logs: Path, address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Run `command`, and enter the block when it serves gRPC at `address`. Raises UnavailableError."""
    async with connect(address) as channel, running(command, logs, channel.channel_ready()):
        yield channel
