"""Expires the keys of ended experiments in the release's Redis. Best effort: experiments have no finalizer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from nexrl.store import Redis, expire_experiment, keep_experiment
from nexrl_operator.credentials import Credentials

log = logging.getLogger(__name__)

KEPT_SECONDS = 3600
"""TTL of the keys: time for people to look into a deleted experiment."""
STOP_SECONDS = 180.0
"""After this time the pods have ended and write no more keys."""
RETRY_SECONDS = 30.0
TRIES = 2880
"""A day. A resumed experiment must lose its TTL, however long Redis is away."""


class LedgerExpiry:
    """Expires the keys of experiments whose ledger is in the release's Redis, which they may not list themselves."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By ledger: the newest decision replaces an older one."""
        self._turn = asyncio.Lock()  # a sweep reads the names of all keys

    def expire(self, ledger: str, ttl_seconds: int) -> None:
        """Set the TTL of the keys of an experiment that has ended."""
        self._begin(ledger, lambda redis: expire_experiment(redis, ledger, ttl_seconds))

    def keep(self, ledger: str) -> None:
        """Remove the TTL of the keys of an experiment that goes on."""
        self._begin(ledger, lambda redis: keep_experiment(redis, ledger))

    def forget(self, ledger: str) -> None:
        """Delete the user of a deleted experiment, and set the TTL of its keys."""

        async def sweep(redis: Redis) -> None:
            await self._credentials.redis_logins.delete(redis, ledger)
            await expire_experiment(redis, ledger, KEPT_SECONDS)

        self._begin(ledger, sweep)

    def close(self) -> None:
        """Cancel what has not been done yet."""
        for task in self._tasks.values():
            task.cancel()

    def _begin(self, ledger: str, sweep: Callable[[Redis], Awaitable[None]]) -> None:
        if (older := self._tasks.pop(ledger, None)) is not None:
            older.cancel()
        task = self._tasks[ledger] = asyncio.create_task(self._sweep_twice(ledger, sweep))
        task.add_done_callback(lambda _: self._tasks.pop(ledger) if self._tasks.get(ledger) is task else None)

    async def _sweep_twice(self, ledger: str, sweep: Callable[[Redis], Awaitable[None]]) -> None:
        for pause_seconds in (0.0, STOP_SECONDS):  # again when its pods have ended
            await asyncio.sleep(pause_seconds)
            await self._sweep(ledger, sweep)

    async def _sweep(self, ledger: str, sweep: Callable[[Redis], Awaitable[None]]) -> None:
        for _ in range(TRIES):
            try:
                async with self._turn, self._credentials.release_redis() as redis:
                    return await sweep(redis)
            except Exception as error:  # noqa: BLE001  # of Redis or of the API server; nobody awaits this task
                log.warning("%s: cannot set the TTL of its keys in Redis: %s", ledger, error)
            await asyncio.sleep(RETRY_SECONDS)
