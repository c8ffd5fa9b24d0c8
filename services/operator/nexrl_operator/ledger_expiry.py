"""Expires the keys in Redis of deleted experiments. Best effort: experiments have no finalizer."""

import asyncio
import logging
from contextlib import aclosing
from urllib.parse import quote, urlsplit, urlunsplit

from nexrl.errors import NexrlError
from nexrl.store import connect_redis, expire_experiment
from nexrl_operator.credentials import Credentials

log = logging.getLogger(__name__)

KEPT_SECONDS = 3600
"""TTL of the keys: time for people to look into a deleted experiment."""
STOP_SECONDS = 180.0
"""After this time the pods have ended and write no more keys."""


class LedgerExpiry:
    """Expires the keys of experiments whose ledger is in the release's Redis."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        self._url = url
        self._credentials = credentials
        self._tasks: set[asyncio.Task[None]] = set()

    def expire(self, ledger: str) -> None:
        """Set the TTL of the ledger's keys now, and again when its pods have ended."""
        task = asyncio.create_task(self._expire(ledger))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel what has not been done yet."""
        for task in self._tasks:
            task.cancel()

    async def _expire(self, ledger: str) -> None:
        for pause_seconds in (0.0, STOP_SECONDS):
            await asyncio.sleep(pause_seconds)
            try:
                async with aclosing(await connect_redis(await self._url_with_secrets())) as connection:
                    await expire_experiment(connection, ledger, KEPT_SECONDS)
            except NexrlError as error:
                log.warning("%s: cannot set the TTL of its keys in Redis: %s", ledger, error)

    async def _url_with_secrets(self) -> str:
        """Return the URL that pods use, with the password and the path of the CA certificate in this process."""
        parts = urlsplit(self._url)
        password = await self._credentials.redis_password()
        address = parts.netloc
        if password:
            user, _, host = parts.netloc.rpartition("@")
            address = f"{quote(user)}:{quote(password, safe='')}@{host}"
        query = parts.query.replace("/etc/nexrl/tls/ca.crt", str(self._credentials.ca_file))
        return urlunsplit(parts._replace(netloc=address, query=query))
