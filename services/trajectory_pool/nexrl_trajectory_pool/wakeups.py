"""Waits that end when the ledger moves. Redis publishes each change, so nothing is polled.

Calls that wait for the same thing form a line. After a wake-up the first call in the line tries. If it succeeds, the
next one tries, until one finds nothing: the others would find nothing either. So a wake-up costs one call of the ledger
more than it grants, however many calls wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from nexrl.store import Redis

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Attempt: TypeAlias = Callable[[], Awaitable[tuple[ResultT, bool]]]
"""Tries once. Returns its answer, and True if the wait ends.

An answer that does not end the wait must be valid for every caller.
"""

RECONNECT_SECONDS = 0.2
SILENCE_SECONDS = 5.0
"""Time without a message after which Redis is pinged. A connection whose peer is lost would be silent forever."""


class _Line(Generic[ResultT]):
    """Calls that wait for the same event. If one finds nothing, the others would find nothing either."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held by the call that tries when there is news; the others sleep."""
        self.news = asyncio.Event()
        """Set if something may be there for which no call of the line has tried."""
        self.nothing: ResultT
        """The newest answer of a try that found nothing."""

    async def look(self, attempt: Attempt[ResultT]) -> tuple[ResultT, bool]:
        """Try once. If this finds nothing, no other call needs to try."""
        try:
            result, is_done = await attempt()
        except BaseException:
            self.news.set()
            raise
        if is_done:
            self.news.set()
        else:
            self.nothing = result
        return result, is_done


class WakeUps:
    """The waits on the channels of some ledgers."""

    def __init__(self, redis: Redis, channels: Sequence[str]) -> None:
        self._redis = redis
        self._channels = channels
        # A line exists while a call waits in it.
        self._lines: WeakValueDictionary[tuple[str, Hashable], _Line[Any]] = WeakValueDictionary()

    async def listen(self) -> None:
        """Pass on what Redis publishes, while the task lives. Every line tries again after a lost connection."""
        while True:
            try:
                await self._pass_on()
            except (RedisError, OSError) as error:
                log.warning("wake-ups: %s", error)
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _pass_on(self) -> None:
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(*self._channels)
            is_silent = False
            while True:
                message = await subscription.get_message(timeout=SILENCE_SECONDS)
                if message is None and is_silent:
                    raise RedisConnectionError(f"no answer within {SILENCE_SECONDS} s")
                is_silent = message is None
                if message is None:
                    await subscription.ping()
                elif message["type"] == "subscribe":  # what was published before it is lost
                    self._tell_all()
                elif message["type"] == "message":
                    self.tell(message["data"].decode())

    def tell(self, topic: str) -> None:
        """Have the first call in each line of `topic` try."""
        for (name, _), line in self._lines.items():
            if name == topic:
                line.news.set()

    def _tell_all(self) -> None:
        for line in self._lines.values():
            line.news.set()

    async def until(self, topic: str, attempt: Attempt[ResultT], wait_seconds: float, kind: Hashable = None) -> ResultT:
        """Call `attempt` until it ends the wait, again after each wake-up of `topic`, for at most `wait_seconds`.

        Returns the newest answer. `kind` holds all that the outcome depends on besides the ledger: calls of one topic
        and kind wait in one line.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + wait_seconds
        line: _Line[ResultT] = self._lines.setdefault((topic, kind), _Line())
        # A new call tries once before it queues, so it may overtake a waiter. FIFO order is not promised, and a
        # repeated request must get its answer at once.
        result, is_done = await line.look(attempt)
        if is_done or not wait_seconds > 0 or not await _in_time(line.turn.acquire(), deadline):
            return result if is_done else line.nothing
        try:
            while not is_done and now() < deadline and await _in_time(line.news.wait(), deadline):
                line.news.clear()  # before it tries, so that what is published meanwhile makes it try again
                result, is_done = await line.look(attempt)
        finally:
            line.turn.release()
        return result if is_done else line.nothing


async def _in_time(waiting: Awaitable[object], deadline: float) -> bool:
    """Wait until `deadline` in the event loop's time; return False if it passed. Never for an attempt: one that is cut
    short may have been granted something that no call receives."""
    try:
        async with asyncio.timeout_at(deadline):
            await waiting
    except TimeoutError:
        return False
    return True
