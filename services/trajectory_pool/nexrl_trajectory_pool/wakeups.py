"""Waits that end when the ledger moves: told by Redis, never polled, and looked into by one waiter after the other.

Of all who wait for the same, the first in line looks when something was told. If it finds something the next one looks,
until one looks in vain, for then the others would too. So a wake-up costs one call of the ledger more than it grants,
however many wait.
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
"""Looks once; gives its answer, and whether that ends the wait. An answer that does not must be the same for all."""

RECONNECT_SECONDS = 0.2
SILENCE_SECONDS = 5.0
"""After it Redis is asked whether it is still there: a peer that vanished without a word would never tell anything."""


class _Line(Generic[ResultT]):
    """Those who wait for the same: what one of them does not find, no other would."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """First come, first served: whoever has it looks when there is news, and the others sleep."""
        self.news = asyncio.Event()
        """Something may be there that nobody of the line has looked for."""
        self.nothing: ResultT
        """The newest answer to a look in vain."""

    async def look(self, attempt: Attempt[ResultT]) -> tuple[ResultT, bool]:
        """Attempt once. Only a look in vain was one for the whole line; after any other the line has to look again."""
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
    """What happened on the channels of some ledgers, and the waits for it."""

    def __init__(self, redis: Redis, channels: Sequence[str]) -> None:
        self._redis = redis
        self._channels = channels
        # A line is there for as long as somebody stands in it.
        self._lines: WeakValueDictionary[tuple[str, Hashable], _Line[Any]] = WeakValueDictionary()

    async def listen(self) -> None:
        """Pass on what Redis tells, for as long as the task lives. After a lost connection every line looks again."""
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
                elif message["type"] == "subscribe":  # whatever was told before it is lost
                    self._tell_all()
                elif message["type"] == "message":
                    self.tell(message["data"].decode())

    def tell(self, topic: str) -> None:
        """The first in each line of `topic` is to look."""
        for (name, _), line in self._lines.items():
            if name == topic:
                line.news.set()

    def _tell_all(self) -> None:
        for line in self._lines.values():
            line.news.set()

    async def until(self, topic: str, attempt: Attempt[ResultT], wait_seconds: float, kind: Hashable = None) -> ResultT:
        """Call `attempt` until it ends the wait, again when `topic` was told, for at most `wait_seconds`.

        Gives the newest answer. `kind` holds all that the outcome depends on besides the ledger: those of one topic and
        kind wait in one line.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + wait_seconds
        line: _Line[ResultT] = self._lines.setdefault((topic, kind), _Line())
        # Who comes looks before it joins the line, and may so take what the first in line was woken for: a repeated
        # request has its answer, whoever waits, and who is served first was promised to nobody.
        result, is_done = await line.look(attempt)
        if is_done or not wait_seconds > 0 or not await _in_time(line.turn.acquire(), deadline):
            return result if is_done else line.nothing
        try:
            while not is_done and now() < deadline and await _in_time(line.news.wait(), deadline):
                line.news.clear()  # before the look, so that what is told meanwhile makes it look again
                result, is_done = await line.look(attempt)
        finally:
            line.turn.release()
        return result if is_done else line.nothing


async def _in_time(waiting: Awaitable[object], deadline: float) -> bool:
    """Wait, but only until `deadline` in the event loop's time. For waits alone: an attempt that is cut short may have
    been granted something that nobody gets."""
    try:
        async with asyncio.timeout_at(deadline):
            await waiting
    except TimeoutError:
        return False
    return True
