"""What an experiment that was deleted has left in Redis: it gets an end. Best effort: there is no finalizer."""

import asyncio
import logging
from contextlib import aclosing
from urllib.parse import quote, urlsplit, urlunsplit

from nexrl.errors import NexrlError
from nexrl.store import connect_redis, expire_experiment
from nexrl_controller.operator.identity import Identity

log = logging.getLogger(__name__)

KEPT_SECONDS = 3600
"""A while for whoever wants to know what it was."""
STOP_SECONDS = 180.0
"""By then its pods have ended, so that nobody writes any more."""


class Ledgers:
    """Knows the ledgers of experiments that are in the release's Redis."""

    def __init__(self, url: str, identity: Identity) -> None:
        self._url = url
        self._identity = identity
        self._tasks: set[asyncio.Task[None]] = set()

    def end(self, ledger: str) -> None:
        """Give its keys an end, now and when its pods are gone."""
        task = asyncio.create_task(self._end(ledger))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Leave the rest as it is."""
        for task in self._tasks:
            task.cancel()

    async def _end(self, ledger: str) -> None:
        for pause_seconds in (0.0, STOP_SECONDS):
            await asyncio.sleep(pause_seconds)
            try:
                async with aclosing(await connect_redis(await self._url_with_secrets())) as connection:
                    await expire_experiment(connection, ledger, KEPT_SECONDS)
            except NexrlError as error:
                log.warning("%s: its keys stay in Redis: %s", ledger, error)

    async def _url_with_secrets(self) -> str:
        """The URL of pods, with the password in it and the authority's certificate where this process has it."""
        parts = urlsplit(self._url)
        password = await self._identity.redis_password()
        address = parts.netloc
        if password:
            user, _, host = parts.netloc.rpartition("@")
            address = f"{quote(user)}:{quote(password, safe='')}@{host}"
        query = parts.query.replace("/etc/nexrl/tls/ca.crt", str(self._identity.ca_file))
        return urlunsplit(parts._replace(netloc=address, query=query))
