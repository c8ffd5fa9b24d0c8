"""Locks the name of an experiment in a shared Redis. A second launcher would delete the ledger of the first."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from nexrl.errors import AlreadyExistsError
from nexrl.store import connect_redis, owner_key

OWNER_SECONDS = 15
"""Time after which the lock of a launcher that was killed expires."""


@contextlib.asynccontextmanager
async def owned(url: str, experiment: str) -> AsyncIterator[None]:
    """Hold the lock of the experiment's name until the end of the block. Raises AlreadyExistsError if it is held."""
    key = owner_key(experiment)
    async with contextlib.aclosing(await connect_redis(url)) as connection:
        if not await connection.set(key, f"{socket.gethostname()}:{os.getpid()}", nx=True, ex=OWNER_SECONDS):
            owner = str(await connection.get(key))
            raise AlreadyExistsError(
                f"metadata.name: {experiment!r} is running in this Redis (launcher {owner}); choose another name, or "
                f"wait {OWNER_SECONDS} s if that launcher was killed"
            )

        async def keep() -> None:
            while True:
                await asyncio.sleep(OWNER_SECONDS / 3)
                await connection.expire(key, OWNER_SECONDS)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await connection.delete(key)
