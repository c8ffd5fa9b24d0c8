"""A copy of the objects of one kind, kept current by list and watch. Reconciliations read it instead of the server."""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
from prometheus_client import Counter

from nexrl.k8s.api import Api, ApiError, Kind

log = logging.getLogger(__name__)

PAGE = 500
WATCH_SECONDS = 300
SILENCE_SECONDS = 75.0
"""The server sends a bookmark each minute; a longer silence means that the connection is cut."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0

RESTARTS = Counter("nexrl_operator_watch_restarts_total", "Watches that broke and were restarted.", ["kind"])

Object = dict[str, Any]


class Cache:
    """The objects of `kind` in `namespace` ("": in all namespaces) that match `selector` and `fields`.

    These are a label selector and a field selector; "" matches all.

    Calls `on_change` for each object that appears, changes or disappears.
    """

    def __init__(
        self, kind: Kind, namespace: str, selector: str, on_change: Callable[[Object], None], *, fields: str = ""
    ) -> None:
        self.kind = kind
        self._namespace = namespace
        chosen = {"labelSelector": selector, "fieldSelector": fields}
        self._query = {key: value for key, value in chosen.items() if value}
        self._on_change = on_change
        self._version = ""
        """The resourceVersion from which the watch continues; "" if a list is required first."""
        self._items: dict[tuple[str, str], Object] = {}
        self.synced = asyncio.Event()
        self.heard_seconds = time.monotonic()
        """Monotonic time at which the last message of the server arrived."""

    def get(self, namespace: str, name: str) -> Object | None:
        """Return the newest known version of one object; None if the object is unknown."""
        return self._items.get((namespace, name))

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._items.values()))

    def __len__(self) -> int:
        return len(self._items)

    def note(self, item: Object) -> None:
        """Store an object from the watch or from the answer to a write, unless a newer version is known."""
        known = self._items.get(_key(item))
        # An unknown object that is not newer than the watch was deleted: the watch has delivered its deletion.
        has_gone = known is None and _version(item) <= int(self._version or 0)
        if not has_gone and not _is_older(item, known):
            self._items[_key(item)] = item

    async def run(self, api: Api) -> None:
        """Keep the copy current until the task is cancelled."""
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            try:
                if not self._version:
                    await self._list(api)
                    self.synced.set()
                await self._watch(api)
                backoff_seconds = FIRST_BACKOFF_SECONDS
                continue  # the server ended this watch after WATCH_SECONDS
            except ApiError as error:
                log.info("%s: %s %s", self.kind.plural, error.reason, error.message)
                self._version = ""  # 410: the resourceVersion to continue from is too old
            except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
                log.info("%s: watch broke: %s", self.kind.plural, type(error).__name__)
            RESTARTS.labels(self.kind.plural).inc()
            await asyncio.sleep(backoff_seconds * random.uniform(0.8, 1.2))
            backoff_seconds = min(2 * backoff_seconds, MAX_BACKOFF_SECONDS)

    async def _list(self, api: Api) -> None:
        found: dict[tuple[str, str], Object] = {}
        query: dict[str, Any] = {"limit": PAGE, **self._query}
        while True:
            page = await api.list(self.kind, self._namespace, **query)
            for item in page["items"]:
                item |= {"apiVersion": self.kind.api_version, "kind": self.kind.kind}
                known = self._items.get(_key(item))
                found[_key(item)] = known if known and _is_older(item, known) else item
            if not (token := page["metadata"].get("continue")):
                break
            query["continue"] = token
        version = str(page["metadata"]["resourceVersion"])
        # Keep the objects that this operator wrote after the list began. The pages do not contain them.
        found |= {key: item for key, item in self._items.items() if key not in found and _version(item) > int(version)}
        self.heard_seconds = time.monotonic()
        changed = [item for key, item in found.items() if not _is_same(self._items.get(key), item)]
        gone = [item for key, item in self._items.items() if key not in found]
        self._items = found
        for item in [*changed, *gone]:
            self._on_change(item)
        self._version = version

    async def _watch(self, api: Api) -> None:
        events = api.watch(
            self.kind,
            self._namespace,
            silence_seconds=SILENCE_SECONDS,
            timeoutSeconds=WATCH_SECONDS,
            resourceVersion=self._version,
            **self._query,
        )
        async for event, item in events:
            self.heard_seconds = time.monotonic()
            if event == "DELETED" and not _is_older(item, self._items.get(_key(item))):
                self._items.pop(_key(item), None)
            elif event not in ("DELETED", "BOOKMARK"):
                self.note(item)  # `note` ignores versions older than the one that a write returned
            if event != "BOOKMARK":
                self._on_change(item)
            self._version = str(item["metadata"]["resourceVersion"])


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _is_same(known: Object | None, item: Object) -> bool:
    return known is not None and known["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]


def _is_older(item: Object, known: Object | None) -> bool:
    # Later versions of objects of one kind have larger numbers. Kubernetes guarantees this since 1.35.
    return known is not None and _version(item) < _version(known)


def _version(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])
