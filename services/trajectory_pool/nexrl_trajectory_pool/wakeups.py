"""Waits that end when the ledger moves: told by Redis, never polled."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from redis.exceptions import RedisError

from nexrl.store import Redis

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
RECONNECT_SECONDS = 0.2


class WakeUps:
    """What happened on the channels of some ledgers, as conditions to wait for."""

    def __init__(self, redis: Redis, channels: Sequence[str]) -> None:
        self._redis = redis
        self._channels = channels
        self._told: defaultdict[str, int] = defaultdict(int)
        self._conditions: defaultdict[str, asyncio.Condition] = defaultdict(asyncio.Condition)

    async def listen(self) -> None:
        """Pass on what Redis tells, for as long as the task lives. After a lost connection everyone looks again."""
        while True:
            try:
                await self._pass_on()
            except (RedisError, OSError) as error:
                log.warning("wake-ups: %s", error)
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _pass_on(self) -> None:
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(*self._channels)
            async for message in subscription.listen():
                if message["type"] == "subscribe":  # whatever was told before it is lost: everyone looks again
                    await self._tell_all()
                elif message["type"] == "message":
                    await self._tell(message["data"].decode())

    async def until(
        self, topic: str, attempt: Callable[[], Awaitable[tuple[ResultT, bool]]], wait_seconds: float
    ) -> ResultT:
        """Call `attempt` until it says that it is done, again whenever `topic` was told, for at most `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        while True:
            seen = self._told[topic]
            result, is_done = await attempt()
            if is_done or not await self._wait(topic, seen, deadline - time.monotonic()):
                return result

    async def _wait(self, topic: str, seen: int, seconds: float) -> bool:
        condition = self._conditions[topic]
        try:
            async with asyncio.timeout(max(0.0, seconds)), condition:
                await condition.wait_for(lambda: self._told[topic] != seen)
        except TimeoutError:
            return False
        return True

    async def _tell(self, topic: str) -> None:
        self._told[topic] += 1
        async with self._conditions[topic]:
            self._conditions[topic].notify_all()

    async def _tell_all(self) -> None:
        for topic in list(self._told):
            await self._tell(topic)
