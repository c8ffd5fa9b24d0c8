"""The user of each experiment in the release's Redis: made with its Secret, and again when Redis has forgotten it."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp

from nexrl.errors import NexrlError, UnavailableError
from nexrl.redis_users import delete_user, known_users, put_user
from nexrl.store import Redis

log = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
"""Time between two looks for users that Redis has forgotten: one that restarts has none, nor has a replica that takes
over. Services try again for longer."""


class RedisLogins:
    """Names and passwords of the users; the name is that of the experiment's ledger."""

    def __init__(self, open_redis: Callable[[], AbstractAsyncContextManager[Redis]]) -> None:
        self._open = open_redis
        self._passwords: dict[str, str] = {}

    def password(self, user: str) -> str:
        """Return the password of a user; a new one for a new user. A Secret that was deleted comes back the same."""
        return self._passwords.get(user) or secrets.token_urlsafe(32)

    def knows(self, user: str) -> bool:
        """Return whether the user is made again when Redis has forgotten it."""
        return user in self._passwords

    async def put(self, user: str, password: str) -> None:
        """Make a user or renew its rights; later if Redis does not answer. Raises FailedPreconditionError."""
        self._passwords[user] = password
        try:
            async with self._open() as redis:
                await put_user(redis, user, password)
        except UnavailableError as error:
            log.warning("%s: its user in Redis is made when Redis answers: %s", user, error)

    async def delete(self, redis: Redis, user: str) -> None:
        """Delete a user for good. Raises NexrlError."""
        self._passwords.pop(user, None)
        await delete_user(redis, user)

    async def keep(self) -> None:
        """Make the users again that Redis has forgotten, until the task is cancelled."""
        problem = ""
        while True:
            try:
                if self._passwords:
                    await self._put_missing()
            except (NexrlError, aiohttp.ClientError, OSError) as error:
                if str(error) != problem:
                    log.warning("cannot look for the users of experiments in Redis: %s", error)
                problem = str(error)
            await asyncio.sleep(CHECK_SECONDS)

    async def _put_missing(self) -> None:
        async with self._open() as redis:
            for user in self._passwords.keys() - await known_users(redis):
                if password := self._passwords.get(user):  # else it was deleted meanwhile
                    await put_user(redis, user, password)
                    log.info("%s: Redis had forgotten its user, and has it again", user)
