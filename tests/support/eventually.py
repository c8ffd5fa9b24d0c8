"""Waiting for a fact."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

FactT = TypeVar("FactT")


async def eventually(fact: Callable[[], Awaitable[FactT]], seconds: float = 30.0) -> FactT:
    """Ask again until the answer is true, or anything but empty; gives it. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not (found := await fact()):  # noqa: ASYNC110  # facts tell nobody
            await asyncio.sleep(0.05)
        return found
