"""One launcher for each experiment of a shared Redis: two would share one ledger, and the second would delete it."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from nexrl.errors import AlreadyExistsError
from nexrl.store import connect_redis, owner_key

OWNER_SECONDS = 15
"""Time after which the name of a launcher that was killed is free again."""


@contextlib.asynccontextmanager
async def owned(url: str, experiment: str) -> AsyncIterator[None]:
    """Own the experiment's name in this Redis while the block runs. Raises AlreadyExistsError while another does."""
    key = owner_key(experiment)
    async with contextlib.aclosing(await connect_redis(url)) as connection:
        if not await connection.set(key, f"{socket.gethostname()}:{os.getpid()}", nx=True, ex=OWNER_SECONDS):
            owner = str(await connection.get(key))
            raise AlreadyExistsError(
                f"metadata.name: {experiment!r} is run in this Redis by {owner}; take another name, or wait "
                f"{OWNER_SECONDS} s when that launcher was killed"
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
