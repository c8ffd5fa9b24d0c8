"""The one home of the waits of tests. No result of a test depends on the speed of the machine.

A wait ends as soon as its fact holds, and a limit only ends a hung test. So limits are long, and they grow with the
load of the machine, which each look reads again.
"""

import asyncio
import functools
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, overload

FactT = TypeVar("FactT")

BASE_SECONDS = 60.0
"""Limit of a wait on a machine whose cores are not all busy."""
MAX_SCALE = 8.0
LIMIT_SECONDS = BASE_SECONDS * MAX_SCALE
"""Limit of what cannot look at the load while it waits: a command, the end of a process, an answer of a server.

It is the longest limit of `eventually`. Never use it where a test expects the end of it.
"""
FIRST_PAUSE_SECONDS = 0.01
LOOKS = 300
"""The longest pause of a wait is this part of its limit: on a cluster, where each look starts a kubectl, a second."""
LONGEST_PAUSE_SECONDS = BASE_SECONDS / LOOKS
_NOTHING = object()


class PatienceError(AssertionError):
    """A wait has reached its limit. The message has the fact, seconds, scale, and last value or error."""


def load_per_core() -> float:
    """Return the number of runnable processes per core, on average over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


class Patience:
    """Limits of waits that grow with the load of the machine. `base_seconds` is the limit without load.

    A `max_scale` of 1 is for a time that is itself what the test is about.
    """

    def __init__(
        self,
        base_seconds: float = BASE_SECONDS,
        *,
        max_scale: float = MAX_SCALE,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], float] = load_per_core,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._base_seconds, self._max_scale = base_seconds, max_scale
        self._load = load
        self._sleep_async = sleep_async
        self._clock = clock
        self._sleep = sleep

    @property
    def scale(self) -> float:
        """The factor by which limits are longer now: the load per core, from 1 to a maximum."""
        return min(max(self._load(), 1.0), self._max_scale)

    def eventually_blocking(
        self, fact: Callable[[], FactT], what: str = "", *, tolerated: tuple[type[Exception], ...] = ()
    ) -> FactT:
        """Call `fact` until its result is truthy, and return that result. See `eventually`."""
        wait = _Wait(self, what or name_of(fact))
        while True:
            try:
                if found := fact():
                    return found
                wait.seen = found
            except tolerated as error:
                wait.seen = error
            self._sleep(wait.pause_seconds())

    @overload
    async def eventually(
        self, fact: Callable[[], Awaitable[FactT]], what: str = "", *, tolerated: tuple[type[Exception], ...] = ()
    ) -> FactT: ...

    @overload
    async def eventually(
        self, fact: Callable[[], FactT], what: str = "", *, tolerated: tuple[type[Exception], ...] = ()
    ) -> FactT: ...

    async def eventually(
        self, fact: Callable[[], Any], what: str = "", *, tolerated: tuple[type[Exception], ...] = ()
    ) -> Any:
        """Call `fact`, which may be async, until its result is truthy, and return that result.

        An error in `tolerated` counts as not yet true. Raises PatienceError at the limit. The default of `what` is the
        name and place of `fact`.
        """
        wait = _Wait(self, what or name_of(fact))
        while True:
            try:
                if found := await _called(fact):
                    return found
                wait.seen = found
            except tolerated as error:
                wait.seen = error
            await self._sleep_async(wait.pause_seconds())

    async def finished(self, awaitable: Awaitable[FactT], what: str) -> FactT:
        """Wait for the result of `awaitable`. At the limit, cancels it and raises PatienceError."""
        task = asyncio.ensure_future(awaitable)
        wait = _Wait(self, what)
        try:
            while not (await asyncio.wait([task], timeout=LONGEST_PAUSE_SECONDS))[0]:
                wait.pause_seconds()
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])


class _Wait:
    """One wait: its beginning, what was seen last, and the next pause."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience, self._what = patience, what
        self._began = patience._clock()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._scale = 1.0
        self.seen: object = _NOTHING

    def pause_seconds(self) -> float:
        """Return the time until the next look. Raises PatienceError if the limit has passed."""
        seconds = self._patience._clock() - self._began
        # The largest so far: a load that falls does not shorten the limit of what it has delayed.
        self._scale = scale = max(self._scale, self._patience.scale)
        if seconds >= self._patience._base_seconds * scale:
            seen = "" if self.seen is _NOTHING else f"; last: {self.seen!r}"
            raise PatienceError(f"not true after {seconds:.0f} s (scale {scale:.1f}): {self._what}{seen}")
        longest = self._patience._base_seconds / LOOKS
        pause, self._pause_seconds = self._pause_seconds, min(2 * self._pause_seconds, longest)
        return pause


async def _called(fact: Callable[[], Any]) -> Any:
    found = fact()
    if not inspect.isawaitable(found):
        return found
    async with asyncio.timeout(LIMIT_SECONDS):  # of a fact that hangs
        return await found


def name_of(fact: Callable[[], object]) -> str:
    """Return the name of a function and its place."""
    code = getattr(inspect.unwrap(fact), "__code__", None)
    name = getattr(fact, "__qualname__", repr(fact))
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name


def ends_within(test: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    """Return the async test with a limit that cancels it as a task is cancelled: where it waits.

    The signal of pytest-timeout raises wherever the loop is, and inside gRPC's loop that has crashed the process.
    """

    @functools.wraps(test)
    async def limited(*arguments: Any, **more: Any) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                await test(*arguments, **more)
        except TimeoutError as error:
            if limit.expired():
                raise PatienceError(f"the test did not end within {seconds:g} s") from error
            raise

    return limited


usual = Patience()
for_minutes = Patience(5 * BASE_SECONDS)
"""For what takes minutes on an idle machine: the start of vLLM, or of pods of a cluster."""
eventually = usual.eventually
eventually_blocking = usual.eventually_blocking
finished = usual.finished
