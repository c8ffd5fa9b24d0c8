"""Who of several operators works: the holder of a Lease."""

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any, NoReturn

import aiohttp

from nexrl.errors import NexrlError
from nexrl.k8s.api import DEPLOYMENT, LEASE, Api, ApiError

log = logging.getLogger(__name__)

LEASE_SECONDS = 15
RENEW_SECONDS = 10.0
"""A leader that could not renew for this long is one no more."""
RETRY_SECONDS = 2.0


class LeadershipLostError(NexrlError):
    """Another one leads, or may: this process must not go on."""


class Election:
    """Takes and keeps the Lease `name` for `holder`; with the `deployment` of the holder, the Lease goes, too."""

    def __init__(self, api: Api, namespace: str, name: str, holder: str, deployment: str = "") -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._holder = holder
        self._deployment = deployment
        self._seen: tuple[str, float] = ("", 0.0)
        """The Lease's version, and when it was seen first: the clocks of two machines are never compared."""
        self._renewed_seconds = 0.0
        """When the newest request was sent that the Lease is ours by: to others, it is as old as that."""
        self.is_leader = False

    async def win(self) -> None:
        """Return when this process leads."""
        while True:
            if await self._try():
                break
            await asyncio.sleep(RETRY_SECONDS)
        self.is_leader = True
        log.info("leading")

    async def keep(self) -> None:
        """Renew, for as long as the task lives. Raises LeadershipLostError, RENEW_SECONDS after the last time."""
        while True:
            try:
                async with asyncio.timeout(self._renewed_seconds + RENEW_SECONDS - time.monotonic()):
                    await asyncio.sleep(RETRY_SECONDS)
                    await self._try()
            except TimeoutError:
                self._lose(f"it could not be renewed for {RENEW_SECONDS:g} s")

    async def release(self) -> None:
        """Let another one lead at once; `keep` has ended, or it would take what is let go."""
        if not self.is_leader:
            return
        self.is_leader = False
        try:
            found = await self._api.get(LEASE, self._namespace, self._name)
            if found is not None and found["spec"].get("holderIdentity") == self._holder:
                await self._api.replace(found | {"spec": {**found["spec"], "holderIdentity": "", "renewTime": _now()}})
        except (NexrlError, aiohttp.ClientError, OSError) as error:
            log.warning("the Lease ends by itself: %s", error)

    async def _try(self) -> bool:
        asked = time.monotonic()
        try:
            async with asyncio.timeout(RENEW_SECONDS / 2):
                if not await self._take():
                    return False
            self._renewed_seconds = asked
            return True
        except (ApiError, aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            log.warning("Lease: %s", str(error) or type(error).__name__)
            return False

    async def _take(self) -> bool:
        found = await self._api.get(LEASE, self._namespace, self._name)
        if found is None:
            metadata = {"name": self._name, "namespace": self._namespace, "ownerReferences": await self._owners()}
            spec = self._spec(acquired=_now(), transitions=0)
            await self._api.create(
                {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
            )
            return True
        spec, version = found["spec"], found["metadata"]["resourceVersion"]
        is_mine = spec.get("holderIdentity") == self._holder
        if not is_mine and (holder := spec.get("holderIdentity")):
            if self.is_leader:
                self._lose(f"{holder} holds it")
            if version != self._seen[0]:
                self._seen = version, time.monotonic()
            if time.monotonic() - self._seen[1] <= spec.get("leaseDurationSeconds", LEASE_SECONDS):
                return False
        acquired = spec.get("acquireTime") if is_mine else _now()
        transitions = spec.get("leaseTransitions", 0) + (not is_mine)
        metadata = found["metadata"] if is_mine else {**found["metadata"], "ownerReferences": await self._owners()}
        # It has the version that was read: of two that take it, one is refused.
        await self._api.replace(found | {"metadata": metadata, "spec": self._spec(acquired or _now(), transitions)})
        return True

    def _lose(self, why: str) -> NoReturn:
        self.is_leader = False
        raise LeadershipLostError(f"the Lease {self._name}: {why}")

    async def _owners(self) -> list[dict[str, Any]]:
        """A Lease left by a release that is gone would tell of a holder that nobody knows."""
        found = await self._api.get(DEPLOYMENT, self._namespace, self._deployment) if self._deployment else None
        kind = {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "name": self._deployment}
        return [kind | {"uid": found["metadata"]["uid"]}] if found else []

    def _spec(self, acquired: str, transitions: int) -> dict[str, Any]:
        return {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": acquired,
            "renewTime": _now(),
            "leaseTransitions": transitions,
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
