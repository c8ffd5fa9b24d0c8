"""Waiting in line: nobody misses a wake-up, and one wake-up is not a look for everybody. Time is virtual."""

import asyncio
import math
import selectors
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl.store import Redis
from nexrl_trajectory_pool.wakeups import WakeUps

TOPIC = "tasks"
LOOK_SECONDS = 0.003  # speed: virtual time
"""The longest way to Redis, and back."""
SETTLE_SECONDS = 5.0  # speed: virtual time
"""Longer than any wake-up takes here."""
LONG_SECONDS = 100.0


class JumpingSelector(selectors.SelectSelector):
    """Passes the time instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all wait, and nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next thing that is due."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def in_virtual_time(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(test)


@dataclass(eq=False)
class Client:
    """One call that waits for `size` things, and how it went."""

    size: int
    came: float
    wait_seconds: float
    looks: int = 0
    has_queued: bool = False
    is_looking: bool = False
    task: "asyncio.Task[int]" = field(init=False)
    ended: float = math.nan

    @property
    def is_waiting(self) -> bool:
        return not self.task.done()

    @property
    def granted(self) -> int:
        return 0 if self.task.cancelled() else self.task.result()


class World:
    """A store of things, and clients that wait for some."""

    def __init__(self, ways: Sequence[float] = (LOOK_SECONDS,)) -> None:
        self.wakeups = WakeUps(Redis(), ["channel"])
        self.stock = 0
        self.lost = 0
        """Granted to clients that had gone."""
        self.tells = 0
        self.cut_short = 0
        """Looks of clients that went meanwhile."""
        self.clients: list[Client] = []
        self.out_of_turn: list[Client] = []
        self._ways: Iterator[float] = cycle(ways)
        self._line: list[Client] = []

    @property
    def looks(self) -> int:
        return sum(client.looks for client in self.clients)

    def come(self, size: int = 1, wait_seconds: float = LONG_SECONDS) -> Client:
        """One more client."""
        client = Client(size, asyncio.get_running_loop().time(), wait_seconds)
        client.task = asyncio.create_task(self._wait(client))
        self.clients.append(client)
        return client

    def put(self, number: int = 1, told_after: float = 0.0) -> None:
        """There is more, which is told."""
        self.stock += number
        self.tells += 1
        asyncio.get_running_loop().call_later(told_after, self.wakeups.tell, TOPIC)

    def go(self, number: int) -> None:
        """A client goes; if some are looking, one of those."""
        there = sorted((c for c in self.clients if c.is_waiting), key=lambda c: not c.is_looking)
        for client in there[number : number + 1]:
            self.cut_short += client.is_looking
            client.task.cancel()

    async def _wait(self, client: Client) -> int:
        try:
            return await self.wakeups.until(TOPIC, lambda: self._look(client), client.wait_seconds, client.size)
        finally:
            client.ended = asyncio.get_running_loop().time()

    async def _look(self, client: Client) -> tuple[int, bool]:
        client.looks += 1
        client.is_looking = True
        await asyncio.sleep(next(self._ways))
        taken = client.size if client.size <= self.stock else 0
        self.stock -= taken
        self.lost += taken
        await asyncio.sleep(next(self._ways))
        self.lost -= taken
        client.is_looking = False
        self._note_turn(client, taken)
        return taken, taken > 0

    def _note_turn(self, client: Client, taken: int) -> None:
        before = [c for c in self._line if c.is_waiting and c.size == client.size]
        if taken and client.has_queued and before[0] is not client:
            self.out_of_turn.append(client)
        if taken and client in before:
            self._line.remove(client)
        if not taken and not client.has_queued:
            client.has_queued = True
            self._line.append(client)


def test_a_wake_up_costs_one_look_more_than_it_grants_and_goes_to_who_came_first() -> None:
    async def test() -> None:
        world = World()
        for _ in range(1000):
            world.come()
            await asyncio.sleep(0.0001)  # speed: virtual time
        await asyncio.sleep(SETTLE_SECONDS)
        assert world.looks == 1000  # as they came
        world.put()
        await asyncio.sleep(SETTLE_SECONDS)
        assert world.looks == 1002
        assert world.clients[0].granted == 1
        world.put(10)
        await asyncio.sleep(SETTLE_SECONDS)
        assert world.looks == 1013
        assert [client.is_waiting for client in world.clients] == [False] * 11 + [True] * 989

    in_virtual_time(test())


def test_something_for_all_reaches_all_by_one_wake_up() -> None:
    async def test() -> None:
        world = World()
        for _ in range(100):
            world.come()
        await asyncio.sleep(SETTLE_SECONDS)
        world.put(100)
        await asyncio.sleep(SETTLE_SECONDS)
        assert not any(client.is_waiting for client in world.clients)

    in_virtual_time(test())


def test_what_is_told_during_a_look_makes_it_look_again() -> None:
    async def test() -> None:
        world = World()
        first = world.come()
        await asyncio.sleep(1.5 * LOOK_SECONDS)  # speed: virtual time; it has found nothing and does not know it yet
        world.put()
        await asyncio.sleep(SETTLE_SECONDS)
        assert (first.granted, first.looks) == (1, 2)
        second = world.come()
        await asyncio.sleep(SETTLE_SECONDS)
        world.wakeups.tell(TOPIC)  # in vain
        await asyncio.sleep(1.5 * LOOK_SECONDS)  # speed: virtual time
        world.put()
        await asyncio.sleep(SETTLE_SECONDS)
        assert (second.granted, second.looks) == (1, 3)

    in_virtual_time(test())


@pytest.mark.parametrize("moment", [0.5 * LOOK_SECONDS, 1.5 * LOOK_SECONDS], ids=["on the way", "on the way back"])
def test_a_client_that_goes_while_it_looks_leaves_what_is_there_to_the_next(moment: float) -> None:
    async def test() -> None:
        world = World()
        first, second = world.come(), world.come()
        await asyncio.sleep(SETTLE_SECONDS)
        world.put(2)
        await asyncio.sleep(moment)
        assert first.is_looking
        first.task.cancel()
        await asyncio.sleep(SETTLE_SECONDS)
        assert second.granted == 1

    in_virtual_time(test())


def test_a_look_that_fails_ends_one_wait_and_no_other() -> None:
    async def test() -> None:
        world = World()
        looks = 0

        async def fail_later() -> tuple[int, bool]:
            nonlocal looks
            looks += 1
            if looks > 1:
                raise ConnectionError
            return 0, False

        failing = asyncio.create_task(world.wakeups.until(TOPIC, fail_later, LONG_SECONDS, kind=1))
        await asyncio.sleep(0)
        second = world.come()
        await asyncio.sleep(SETTLE_SECONDS)
        world.put()
        await asyncio.sleep(SETTLE_SECONDS)
        assert isinstance(failing.exception(), ConnectionError)
        assert second.granted == 1

    in_virtual_time(test())


def test_a_wait_that_is_over_takes_no_turn() -> None:
    async def test() -> None:
        world = World()
        short, gone, third = world.come(wait_seconds=1), world.come(), world.come()
        await asyncio.sleep(2)  # speed: virtual time
        assert short.granted == 0
        gone.task.cancel()
        await asyncio.sleep(0.1)  # speed: virtual time
        world.put()
        await asyncio.sleep(SETTLE_SECONDS)
        assert third.granted == 1
        assert (short.looks, gone.looks, third.looks) == (1, 1, 2)

    in_virtual_time(test())


def test_who_asks_for_less_does_not_wait_behind_who_asks_for_more() -> None:
    async def test() -> None:
        world = World()
        large, small = world.come(size=4), world.come(size=2)
        await asyncio.sleep(SETTLE_SECONDS)
        world.put(3)
        await asyncio.sleep(SETTLE_SECONDS)
        assert (large.is_waiting, small.granted) == (True, 2)

    in_virtual_time(test())


def test_a_wait_ends_in_time_also_when_it_is_told_without_end() -> None:
    async def test() -> None:
        world = World(ways=[0.0, LOOK_SECONDS])
        client = world.come(wait_seconds=1)
        while client.is_waiting:
            world.wakeups.tell(TOPIC)
            await asyncio.sleep(0.0001)  # speed: virtual time
        assert client.granted == 0
        assert client.ended == pytest.approx(1, abs=2 * LOOK_SECONDS)

    in_virtual_time(test())


@pytest.mark.parametrize("wait_seconds", [0.0, -1.0, math.nan])
def test_who_does_not_wait_looks_once_also_when_others_wait(wait_seconds: float) -> None:
    async def test() -> None:
        world = World()
        world.come()
        await asyncio.sleep(SETTLE_SECONDS)
        client = world.come(wait_seconds=wait_seconds)
        await asyncio.sleep(SETTLE_SECONDS)
        assert (client.granted, client.looks) == (0, 1)

    in_virtual_time(test())


def test_the_newest_answer_is_given_to_all_who_waited_in_vain() -> None:
    async def test() -> None:
        world = World()
        answers = iter(["credit", "credit", "validation", "data"])

        async def look() -> tuple[str, bool]:
            return next(answers), False

        async def wait(seconds: float) -> str:
            return await world.wakeups.until(TOPIC, look, seconds)

        first, second = [asyncio.create_task(wait(seconds)) for seconds in (20, 10)]
        await asyncio.sleep(1)  # speed: virtual time
        world.wakeups.tell(TOPIC)
        assert await second == "validation"
        assert await wait(0) == "data"
        assert await first == "data"

    in_virtual_time(test())


waits = st.sampled_from([0.0, 0.004, 3.0, LONG_SECONDS, LONG_SECONDS, LONG_SECONDS])
histories = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 4), waits),
        st.tuples(st.just("put"), st.integers(1, 4), st.sampled_from([0.0, 0.002, 0.01])),
        st.tuples(st.just("go"), st.integers(0, 2), st.sampled_from([0.0, 0.001, 0.004])),
        st.tuples(st.just("pause"), st.just(0), st.sampled_from([0.001, 0.002, 0.004, LOOK_SECONDS])),
        st.tuples(st.just("settle"), st.just(0), st.just(SETTLE_SECONDS)),
    ),
    min_size=10,
    max_size=60,
)
way_lists = st.lists(st.sampled_from([0.0, 0.001, LOOK_SECONDS]), min_size=1, max_size=7)


@settings(max_examples=200)
@given(histories, way_lists)
def test_no_wake_up_is_missed_and_no_look_is_too_much_in_any_history(
    history: list[tuple[str, int, float]], ways: list[float]
) -> None:
    in_virtual_time(_follow(history, ways))


async def _follow(history: list[tuple[str, int, float]], ways: list[float]) -> None:
    world = World(ways)
    stock_put, taken_elsewhere = 0, 0
    for action, number, seconds in [*history, ("settle", 0, SETTLE_SECONDS)]:
        if action == "come":
            for _ in range(number):
                world.come(3 if len(world.clients) % 5 == 4 else 1, seconds)
        elif action == "put":
            stock_put += number
            world.put(number, seconds)
        elif action == "go":
            await asyncio.sleep(seconds)
            world.go(number)
        elif action == "pause":
            await asyncio.sleep(seconds)
        elif action == "settle":
            await asyncio.sleep(seconds)
            assert [c for c in world.clients if c.is_waiting and c.size <= world.stock] == []
            taken_elsewhere, world.stock = taken_elsewhere + world.stock, 0
    await asyncio.sleep(LONG_SECONDS)
    for client in world.clients:
        assert client.task.done()
        assert client.task.cancelled() or client.ended - client.came <= client.wait_seconds + 3 * LOOK_SECONDS
    granted = [client.granted for client in world.clients]
    assert sum(granted) + world.lost + taken_elsewhere + world.stock == stock_put
    assert world.out_of_turn == []
    lines = len({client.size for client in world.clients})
    assert world.looks <= len(granted) + lines * world.tells + sum(g > 0 for g in granted) + world.cut_short
