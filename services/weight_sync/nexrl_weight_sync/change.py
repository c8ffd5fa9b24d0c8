"""Waiting for a state to change."""

import asyncio
from collections.abc import Callable


class Change:
    """Wakes those who wait for a condition on some state, at each change of it. For one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True once nobody may wait any longer."""
        return self._is_closed

    def notify(self) -> None:
        """The state has changed."""
        self._next.set()
        self._next = asyncio.Event()

    def close(self) -> None:
        """End all waits, also later ones."""
        self._is_closed = True
        self.notify()

    async def until(self, condition: Callable[[], bool], wait_seconds: float | None = None) -> bool:
        """Wait until `condition` holds, at most `wait_seconds`; gives whether it does."""
        try:
            async with asyncio.timeout(wait_seconds):
                while not condition() and not self._is_closed:
                    await self._next.wait()
        except TimeoutError:
            pass
        return condition()

    async def once(self, wait_seconds: float | None) -> None:
        """Wait for the next change, at most `wait_seconds`."""
        is_over = self._next.is_set
        await self.until(is_over, wait_seconds)
