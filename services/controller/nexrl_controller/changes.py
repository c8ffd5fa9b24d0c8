"""A wake-up for everyone who waits for the next change of something."""

import asyncio


class Changes:
    """Announces a change. Check the fact, then wait: on one event loop, nothing can slip in between."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def announce(self) -> None:
        """Wake up everyone who waits now."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next announcement."""
        await self._next.wait()
