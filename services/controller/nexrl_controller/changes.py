"""Wakes up all tasks that wait for the next change of something."""

import asyncio


class Changes:
    """Announces changes. Check the fact, then wait: on one event loop, no change can be missed in between."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def announce(self) -> None:
        """Wake up all tasks that wait now."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next announcement."""
        await self._next.wait()
