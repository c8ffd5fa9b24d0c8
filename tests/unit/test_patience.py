"""The waits of tests: when they end, how long they may last, and what they say."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.patience import (
    BASE_SECONDS,
    LIMIT_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MAX_SCALE,
    Patience,
    PatienceError,
    ends_within,
    eventually,
    finished,
)

PROJECT = Path(__file__).parents[2]
HANGS = """
import asyncio
import pytest


async def test_hangs() -> None:
    await asyncio.Event().wait()


@pytest.mark.timeout(3)
async def test_with_a_mark_hangs() -> None:
    await asyncio.Event().wait()
"""
NO_SIGNAL = """
def pytest_timeout_set_timer(item, settings):
    return True  # so pytest-timeout starts no timer
"""


class Machine:
    """A machine whose time passes only while a wait sleeps, and whose load follows a function of that time."""

    def __init__(self, load: Callable[[float], float] = lambda now: 0.0) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.patience = Patience(
            clock=lambda: self.now, load=lambda: load(self.now), sleep=self.sleep, sleep_async=self.sleep_async
        )

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)

    def waited_in_vain(self) -> float:
        """Return how long a wait for what never is true has lasted."""
        with pytest.raises(PatienceError):
            self.patience.eventually_blocking(lambda: False)
        return self.now


def test_a_wait_returns_the_first_truthy_result() -> None:
    results: Iterator[object] = iter([0, "", None, ["found"], "later"])
    assert Machine().patience.eventually_blocking(lambda: next(results)) == ["found"]


async def test_a_fact_may_be_async() -> None:
    results: Iterator[int] = iter([0, 0, 7, 8])

    async def fact() -> int:
        return next(results)

    assert await Machine().patience.eventually(fact) == 7
    assert await Machine().patience.eventually(lambda: next(results)) == 8


@pytest.mark.parametrize(
    ("load", "seconds"),
    [(0.0, BASE_SECONDS), (1.0, BASE_SECONDS), (2.5, 2.5 * BASE_SECONDS), (100.0, MAX_SCALE * BASE_SECONDS)],
)
def test_the_limit_grows_with_the_load_from_one_to_eight_times(load: float, seconds: float) -> None:
    assert seconds <= Machine(lambda now: load).waited_in_vain() <= seconds + 2 * LONGEST_PAUSE_SECONDS


def test_the_limit_of_a_wait_grows_with_the_load_while_it_waits_and_never_shrinks() -> None:
    busy_later = Machine(lambda now: 0.5 if now < BASE_SECONDS / 2 else 3.0)
    assert busy_later.waited_in_vain() >= 3 * BASE_SECONDS
    quiet_later = Machine(lambda now: 3.0 if now < 2 * BASE_SECONDS else 0.0)
    assert quiet_later.waited_in_vain() >= 3 * BASE_SECONDS


def test_a_time_that_is_the_subject_of_a_test_does_not_grow() -> None:
    machine = Machine(lambda now: 5.0)
    patience = Patience(30.0, max_scale=1.0, clock=lambda: machine.now, load=lambda: 5.0, sleep=machine.sleep)
    with pytest.raises(PatienceError, match=r"after 30 s \(scale 1\.0\)"):
        patience.eventually_blocking(lambda: False)


def test_no_wait_is_longer_than_the_limit_of_what_cannot_look_at_the_load() -> None:
    assert Machine(lambda now: 1e9).waited_in_vain() <= LIMIT_SECONDS + LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize(("base_seconds", "longest"), [(BASE_SECONDS, LONGEST_PAUSE_SECONDS), (300.0, 1.0)])
def test_pauses_begin_short_and_stay_a_small_part_of_the_limit(base_seconds: float, longest: float) -> None:
    machine = Machine()
    patience = Patience(base_seconds, clock=lambda: machine.now, load=lambda: 0.0, sleep=machine.sleep)
    with pytest.raises(PatienceError):
        patience.eventually_blocking(lambda: False)
    assert machine.pauses[0] < machine.pauses[1] < 0.05
    assert max(machine.pauses) == longest


def test_a_fact_that_is_true_at_the_last_look_is_enough() -> None:
    machine = Machine()
    assert machine.patience.eventually_blocking(lambda: machine.now >= BASE_SECONDS)


async def test_the_message_says_what_how_long_the_scale_and_the_last_value() -> None:
    for patience in (Machine(lambda now: 2.0).patience, Machine(lambda now: 2.0).patience):
        with pytest.raises(PatienceError, match=r"^not true after 120 s \(scale 2\.0\): the door is open; last: \[\]$"):
            await patience.eventually(list, "the door is open")


def test_without_a_description_the_message_names_the_fact_and_its_place() -> None:
    def is_open() -> bool:
        return False

    with pytest.raises(PatienceError, match=r"is_open \(test_patience\.py:\d+\); last: False"):
        Machine().patience.eventually_blocking(is_open)


async def test_a_tolerated_error_is_not_yet_and_the_last_one_is_named() -> None:
    looks = iter([KeyError("early"), None])

    def fact() -> str:
        error = next(looks)
        if error:
            raise error
        return "found"

    def fails() -> bool:
        raise KeyError("still closed")

    assert await Machine().patience.eventually(fact, tolerated=(KeyError,)) == "found"
    with pytest.raises(PatienceError, match="last: KeyError\\('still closed'\\)"):
        Machine().patience.eventually_blocking(fails, tolerated=(KeyError,))
    with pytest.raises(KeyError):
        Machine().patience.eventually_blocking(fails)
    with pytest.raises(KeyError):
        await eventually(fails)


async def test_the_result_or_the_error_of_an_awaitable_is_returned() -> None:
    async def answers(error: Exception | None) -> int:
        await asyncio.sleep(0)
        if error:
            raise error
        return 7

    assert await finished(answers(None), "an answer") == 7
    with pytest.raises(KeyError):
        await finished(answers(KeyError()), "an answer")


async def test_an_awaitable_that_does_not_end_is_cancelled_and_named() -> None:
    waiting = asyncio.create_task(asyncio.Event().wait())
    clock = iter([0.0, BASE_SECONDS - 1, 3 * BASE_SECONDS])
    with pytest.raises(PatienceError, match=r"after 180 s \(scale 1\.0\): a lease"):
        await Patience(clock=lambda: next(clock), load=lambda: 0.0).finished(waiting, "a lease")
    assert waiting.cancelled()


async def test_a_cancelled_wait_for_an_awaitable_cancels_it() -> None:
    inner = asyncio.create_task(asyncio.Event().wait())
    outer = asyncio.create_task(finished(inner, "a lease"))
    await asyncio.sleep(0)
    outer.cancel()
    await asyncio.wait([outer])
    assert outer.cancelled()
    assert inner.cancelled()


async def test_a_test_that_hangs_is_cancelled_where_it_waits() -> None:
    cleaned_up = []

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(True)

    with pytest.raises(PatienceError, match=r"did not end within 0\.01 s"):
        await ends_within(hangs, 0.01)()
    assert cleaned_up


async def test_a_time_limit_of_the_test_itself_stays_what_it_is() -> None:
    async def times_out() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await ends_within(times_out, LIMIT_SECONDS)()


def test_a_hung_async_test_is_ended_before_its_limit_without_the_signal(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(NO_SIGNAL)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", "."]
    settings = ["-o", "asyncio_mode=auto", "-o", "timeout=2", "-o", "timeout_func_only=true"]
    done = subprocess.run(
        [*command, *settings, "test_hangs.py"],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("PatienceError: the test did not end within 1.8 s") >= 1
    assert done.stdout.count("PatienceError: the test did not end within 2.7 s") >= 1  # its mark is heeded
