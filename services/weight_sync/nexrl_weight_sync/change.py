"""Waiting for a state to change."""

import asyncio
from collections.abc import Callable


class Change:
    """Lets coroutines of one event loop wait for a condition on some state. Call `notify` when the state changes."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True after `close`: waits return at once."""
        return self._is_closed

    def notify(self) -> None:
        """Wake all waits, so that they check their conditions again."""
        self._next.set()
        self._next = asyncio.Event()

    def close(self) -> None:
        """End all waits, and all later ones."""
        self._is_closed = True
        self.notify()

    async def until(self, condition: Callable[[], bool], wait_seconds: float | None = None) -> bool:
        """Wait until `condition` holds, at most `wait_seconds`. Returns whether it holds."""
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
