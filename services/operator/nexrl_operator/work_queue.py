"""A queue of experiments to reconcile: each is queued once, has one worker at a time, and is retried with backoff."""

import asyncio
import random
from collections.abc import Awaitable, Callable

FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 300.0

Key = tuple[str, str]
"""Namespace and name."""


class WorkQueue:
    """Any task of the event loop may `add`; each worker is a task that runs `work`."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        """Keys that were added while a worker had them."""
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    @property
    def depth(self) -> int:
        """The number of keys that wait for a worker."""
        return len(self._queued)

    def add(self, key: Key) -> None:
        """Queue a key. Idempotent while it waits."""
        if key in self._busy:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key after so many seconds. An earlier time that was set before stays."""
        loop = asyncio.get_running_loop()
        known = self._timers.get(key)
        if known is not None and not known.cancelled() and loop.time() <= known.when() <= loop.time() + seconds:
            return
        if known is not None:
            known.cancel()
        self._timers[key] = loop.call_later(seconds, self.add, key)

    def forget(self, key: Key) -> None:
        """Drop the timer and the backoff of a key."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        self._failures.pop(key, None)

    async def work(self, task: Callable[[Key], Awaitable[bool]]) -> None:
        """Run `task` for one key after the other. A key whose task returns False is retried with backoff."""
        while True:
            key = await self._ready.get()
            self._queued.discard(key)
            self._busy.add(key)
            try:
                is_done = await task(key)
            finally:
                self._busy.discard(key)
            if is_done:
                self._failures.pop(key, None)
            else:
                self.add_after(key, self._backoff_seconds(key))
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _backoff_seconds(self, key: Key) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16), MAX_BACKOFF_SECONDS) * random.uniform(0.8, 1.2)
