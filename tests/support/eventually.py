"""Waits until a condition holds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

FactT = TypeVar("FactT")


async def eventually(fact: Callable[[], Awaitable[FactT]], seconds: float = 30.0) -> FactT:
    """Call the condition until its result is truthy, and return that result. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not (found := await fact()):  # noqa: ASYNC110  # a fact sends no event
            await asyncio.sleep(0.05)
        return found
