"""Runs code of the user apart from the event loop of this process, which serves gateway, leases and heartbeats.

- A plain function runs in a thread of its own, so it may block.
- Coroutines share one event loop in one thread: they may share clients, and need no locks. A call that blocks there
  delays only the other coroutines. `watch` reports its file and line.

Python cannot end a thread. A plain function that has not returned some time after its cancellation is abandoned:
nothing waits for it any more. `watch` ends the process when too many of them are left.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nexrl.activity import ActivityTracker
from nexrl.code_reference import USER_CODE_ERRORS, is_async
from nexrl.errors import DeadlineExceededError, ResourceExhaustedError
from nexrl.exception_text import defined_at, stack_place
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
ADVICE = "write `def run`, which may block, or await an async client"


@dataclass(frozen=True)
class ThreadLimits:
    """Bounds of the threads."""

    max_abandoned: int
    """Functions that have not returned after their cancellation; the process ends with this many."""
    max_blocked_seconds: float
    """Longest time for which a call may block the event loop of the coroutines; the process ends after it."""
    blocked_seconds: float = 5.0
    """Time after which a call that blocks that event loop is reported."""
    grace_seconds: float = 5.0
    """Time after a cancellation in which the code can still end, with its `finally` blocks."""


@dataclass(frozen=True)
class _End:
    """How a call ended: with `error` if it raised, else with `value`."""

    value: Any = None
    error: BaseException | None = None


class UserThreads:
    """Calls functions and coroutine functions of the user. `watch` must run in the background."""

    def __init__(self, limits: ThreadLimits, activity: ActivityTracker) -> None:
        self._limits = limits
        self._activity = activity
        self._abandoned: dict[asyncio.Future[_End], str] = {}
        self._coroutines: _LoopThread | None = None
        self._reported: set[str] = set()

    async def run(self, function: Callable[..., Any], arguments: Sequence[object], name: str) -> Any:
        """Call `function`; return its result or raise its exception. Error messages and the activity call it `name`.

        If this call is cancelled, a coroutine is cancelled, too. Either kind then has `grace_seconds` to end.
        """
        with self._activity.in_flight("user code", waiting_on=name):
            end = await self._end(function, arguments, name)
        if end.error is not None:
            raise end.error
        return end.value

    async def _end(self, function: Callable[..., Any], arguments: Sequence[object], name: str) -> _End:
        ended: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        thread, cancel = self._start(function, arguments, ended)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError as error:
            cancel()
            where = f"{name} at {stack_place(thread.ident) or defined_at(function)}"
            await self._wait_in_grace(ended)
            if not (is_async(function) and ended.done()):  # the exception of a cancelled coroutine names its line
                error.add_note(f"{where} had not returned")
            if ended.done():
                raise error from ended.result().error
            if not is_async(function):
                self._abandon(ended, where)
            raise

    async def watch(self) -> None:
        """Report calls that block the event loop of the coroutines.

        Raises ResourceExhaustedError for too many abandoned functions, DeadlineExceededError for a loop that is blocked
        too long. Only a new process can mend either.
        """
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if len(self._abandoned) >= self._limits.max_abandoned:
                newest = list(self._abandoned.values())[-1]
                raise ResourceExhaustedError(
                    f"{len(self._abandoned)} calls have not returned after their cancellation, the newest of {newest}; "
                    "give its requests and waits a time limit below rollout.timeoutSeconds"
                )
            if self._coroutines is not None:
                await self._check(self._coroutines)

    def _start(
        self, function: Callable[..., Any], arguments: Sequence[object], ended: asyncio.Future[_End]
    ) -> tuple[threading.Thread, Callable[[], object]]:
        """Start the call. Returns its thread, and a function that asks it to end."""
        deliver = partial(_deliver, asyncio.get_running_loop(), ended)
        if is_async(function):
            self._coroutines = self._coroutines or _LoopThread()
            return self._coroutines.thread, self._coroutines.start(function, arguments, deliver)
        # A daemon: it must not keep a process that stops.
        thread = threading.Thread(target=_call, args=(function, arguments, deliver), daemon=True)
        thread.start()
        return thread, lambda: None

    async def _wait_in_grace(self, ended: asyncio.Future[_End]) -> None:
        deadline = time.monotonic() + self._limits.grace_seconds
        while not ended.done() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.CancelledError):  # a process that stops cancels repeatedly
                await asyncio.wait((ended,), timeout=left)

    def _abandon(self, ended: asyncio.Future[_End], text: str) -> None:
        self._abandoned[ended] = text
        ended.add_done_callback(self._abandoned.pop)
        log.warning(
            "%s has not returned: abandoned, %d of at most %d", text, len(self._abandoned), self._limits.max_abandoned
        )

    async def _check(self, coroutines: "_LoopThread") -> None:
        answered = asyncio.Event()
        coroutines.loop.call_soon_threadsafe(asyncio.get_running_loop().call_soon_threadsafe, answered.set)
        if await _is_set_within(answered, self._limits.blocked_seconds):
            return
        place = stack_place(coroutines.thread.ident)
        text = f"the call at {place} blocks the event loop of all episodes; {ADVICE}"
        if place not in self._reported:
            self._reported.add(place)
            await self._activity.report(text, work_context="environment", severity=SEVERITY_WARNING)
        if not await _is_set_within(answered, self._limits.max_blocked_seconds):
            raise DeadlineExceededError(f"{text}. It has not returned for {self._limits.max_blocked_seconds:g} s")


class _LoopThread:
    """An event loop that runs in a thread as long as the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="coroutines of the user", daemon=True)
        self.thread.start()

    def start(
        self, function: Callable[..., Any], arguments: Sequence[object], deliver: Callable[[_End], None]
    ) -> Callable[[], object]:
        """Start a coroutine. Returns a function that cancels it. Both may be called in any thread."""
        tasks: list[asyncio.Task[None]] = []  # the loop keeps only weak references to tasks

        def begin() -> None:
            tasks.append(self.loop.create_task(_await(function, arguments, deliver)))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self.loop.call_soon_threadsafe(begin)
        return partial(self.loop.call_soon_threadsafe, cancel)


def _call(function: Callable[..., Any], arguments: Sequence[object], deliver: Callable[[_End], None]) -> None:
    try:
        end = _End(function(*arguments))
    except USER_CODE_ERRORS as error:
        end = _End(error=error)
    deliver(end)


async def _await(function: Callable[..., Any], arguments: Sequence[object], deliver: Callable[[_End], None]) -> None:
    try:
        end = _End(await function(*arguments))
    except (*USER_CODE_ERRORS, asyncio.CancelledError) as error:
        end = _End(error=error)
    deliver(end)


def _deliver(owner: asyncio.AbstractEventLoop, ended: asyncio.Future[_End], end: _End) -> None:
    """Hand the end of a call to the loop that waits for it. Called in another thread."""
    with contextlib.suppress(RuntimeError):  # that loop is closed: the process ends
        owner.call_soon_threadsafe(ended.set_result, end)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
