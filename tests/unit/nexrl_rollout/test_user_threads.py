"""Code of the user that blocks, beside an event loop that must go on."""

import asyncio
import inspect
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from nexrl.activity import ActivityTracker
from nexrl.errors import DeadlineExceededError, ResourceExhaustedError
from nexrl.exception_text import exception_text
from nexrl.v1.activity_service_pb2 import Module
from nexrl_rollout import user_threads
from nexrl_rollout.user_threads import ThreadLimits, UserThreads

LIMITS = ThreadLimits(max_abandoned=2, max_blocked_seconds=60, grace_seconds=0.01)
PATIENT = replace(LIMITS, grace_seconds=60)


def activity() -> ActivityTracker:
    return ActivityTracker(Module(name="rollout-0"), None)


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if text in line)}"


async def test_functions_block_at_the_same_time_and_the_loop_goes_on() -> None:
    threads, meet, may_end = UserThreads(LIMITS, activity()), threading.Barrier(2), threading.Event()

    def block() -> int:
        meet.wait()
        may_end.wait()
        return threading.get_ident()

    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(threads.run(block, (), "it")) for _ in range(2)]
        await asyncio.sleep(0)  # this loop goes on, and so can end both
        may_end.set()
    assert len({call.result() for call in calls} | {threading.get_ident()}) == 3


async def test_coroutines_share_a_loop_that_is_not_this_one() -> None:
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    threads = UserThreads(LIMITS, activity())
    first, second = await threads.run(loop, (), "it"), await threads.run(loop, (), "it")
    assert first is second
    assert first is not asyncio.get_running_loop()


@pytest.mark.parametrize("error", [KeyError("nope"), SystemExit(3), StopIteration(), asyncio.CancelledError("own")])
async def test_what_a_function_or_coroutine_raises_reaches_the_caller(error: BaseException) -> None:
    def fails() -> None:
        raise error

    async def fails_later() -> None:
        raise error

    functions = [fails_later] if isinstance(error, asyncio.CancelledError) else [fails, fails_later]
    threads = UserThreads(LIMITS, activity())
    for function in functions:
        with pytest.raises((type(error), RuntimeError)) as raised:  # a coroutine cannot raise StopIteration
            await threads.run(function, (), "it")
        assert isinstance(raised.value, type(error)) or "StopIteration" in str(raised.value)


async def test_a_cancelled_coroutine_ends_with_its_finally_and_its_line_is_named() -> None:
    begun, cleaned = threading.Event(), threading.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    call = asyncio.create_task(UserThreads(PATIENT, activity()).run(waits, (), "it"))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await call
    assert cleaned.is_set()
    assert line_of(waits, "Event().wait()") in exception_text(cast(BaseException, raised.value.__cause__))


async def test_a_function_that_returns_soon_after_its_cancellation_is_named_and_not_abandoned() -> None:
    threads, begun, may_end = UserThreads(PATIENT, activity()), threading.Event(), threading.Event()

    def waits() -> None:
        begun.set()
        may_end.wait()

    call = asyncio.create_task(threads.run(waits, (), "the reward"))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    await asyncio.sleep(0)  # it waits in grace
    may_end.set()
    with pytest.raises(asyncio.CancelledError) as raised:
        await call
    assert re.search(rf"the reward at {__file__}:\d+ had not returned", exception_text(raised.value))
    assert not threads._abandoned


async def test_functions_that_go_on_after_their_cancellation_are_named_and_too_many_end_the_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_threads, "WATCH_SECONDS", 0.001)
    threads, begun, may_end = UserThreads(LIMITS, activity()), threading.Semaphore(0), threading.Event()

    def hangs() -> None:
        begun.release()
        may_end.wait()

    place = f"{__file__}:"  # the thread may be at either line
    try:
        for _ in range(LIMITS.max_abandoned):
            call = asyncio.create_task(threads.run(hangs, (), "the environment"))
            await asyncio.to_thread(begun.acquire)
            call.cancel()
            with pytest.raises(asyncio.CancelledError) as raised:
                await call
            text = exception_text(raised.value)
            assert f"the environment at {place}" in text
            assert "had not returned" in text
        assert " has not returned: abandoned, 2 of at most 2" in caplog.text
        with pytest.raises(ResourceExhaustedError, match=f"2 calls have not returned.* the environment at {place}"):
            await threads.watch()
    finally:
        may_end.set()
    await asyncio.wait(list(threads._abandoned))
    assert not threads._abandoned  # what returns at last no longer counts


async def test_a_call_that_blocks_the_loop_of_the_coroutines_is_named_once_and_ends_the_process_if_it_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_threads, "WATCH_SECONDS", 0.001)
    threads = UserThreads(replace(LIMITS, blocked_seconds=0.01, max_blocked_seconds=0.05), activity())
    begun, may_end = threading.Event(), threading.Event()

    async def blocks() -> None:
        begun.set()
        may_end.wait()

    call = asyncio.create_task(threads.run(blocks, (), "it"))
    try:
        await asyncio.to_thread(begun.wait)
        with pytest.raises(DeadlineExceededError, match=r"It has not returned for 0\.05 s"):
            await threads.watch()
    finally:
        may_end.set()
    await call
    assert f"the call at {__file__}:" in caplog.text
    assert caplog.text.count("blocks the event loop of all episodes; write `def run`") == 1
