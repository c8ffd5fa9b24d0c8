"""Expires the keys of ended experiments in the release's Redis. Best effort: experiments have no finalizer."""

import asyncio
import logging

import aiohttp

from nexrl.errors import NexrlError
from nexrl.store import expire_experiment
from nexrl_operator.credentials import Credentials

log = logging.getLogger(__name__)

KEPT_SECONDS = 3600
"""TTL of the keys: time for people to look into a deleted experiment."""
STOP_SECONDS = 180.0
"""After this time the pods have ended and write no more keys."""


class LedgerExpiry:
    """Expires the keys of experiments whose ledger is in the release's Redis, which they may not list themselves."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # a sweep reads the names of all keys

    def expire(self, ledger: str, ttl_seconds: int) -> None:
        """Set the TTL of the keys of an experiment that has ended."""
        self._begin(ledger, ttl_seconds, is_deleted=False)

    def forget(self, ledger: str) -> None:
        """Delete the user of a deleted experiment, and set the TTL of its keys."""
        self._begin(ledger, KEPT_SECONDS, is_deleted=True)

    def close(self) -> None:
        """Cancel what has not been done yet."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, ledger: str, ttl_seconds: int, is_deleted: bool) -> None:
        task = asyncio.create_task(self._expire(ledger, ttl_seconds, is_deleted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire(self, ledger: str, ttl_seconds: int, is_deleted: bool) -> None:
        for pause_seconds in (0.0, STOP_SECONDS):  # again when its pods have ended
            await asyncio.sleep(pause_seconds)
            try:
                async with self._turn:
                    await self._sweep(ledger, ttl_seconds, is_deleted)
            except (NexrlError, aiohttp.ClientError, OSError) as error:
                log.warning("%s: cannot set the TTL of its keys in Redis: %s", ledger, error)

    async def _sweep(self, ledger: str, ttl_seconds: int, is_deleted: bool) -> None:
        async with self._credentials.release_redis() as redis:
            if is_deleted:
                await self._credentials.redis_logins.delete(redis, ledger)
            await expire_experiment(redis, ledger, ttl_seconds)
