"""Leader election. Several operators may run; only the holder of the Lease reconciles."""

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
"""A leader that has not renewed for this long is no longer the leader."""
RETRY_SECONDS = 2.0


class LeadershipLostError(NexrlError):
    """Another operator is, or may be, the leader: this process must stop."""


class Election:
    """Takes and renews the Lease `name` for `holder`.

    Kubernetes deletes the Lease together with the Deployment `deployment`, which owns it.
    """

    def __init__(self, api: Api, namespace: str, name: str, holder: str, deployment: str = "") -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._holder = holder
        self._deployment = deployment
        self._seen: tuple[str, float] = ("", 0.0)
        """The version of another holder's Lease, and the monotonic time at which this process first saw it."""
        self._renewed_seconds = 0.0
        """Monotonic time just before the last successful renewal was sent. Other operators see the renewal later."""
        self.is_leader = False

    async def win(self) -> None:
        """Wait until this process is the leader."""
        while True:
            if await self._try():
                break
            await asyncio.sleep(RETRY_SECONDS)
        self.is_leader = True
        log.info("leading")

    async def keep(self) -> None:
        """Renew the Lease until the task is cancelled.

        Raises LeadershipLostError RENEW_SECONDS after the last successful renewal, or when another operator holds it.
        """
        while True:
            try:
                async with asyncio.timeout(self._renewed_seconds + RENEW_SECONDS - time.monotonic()):
                    await asyncio.sleep(RETRY_SECONDS)
                    await self._try()
            except TimeoutError:
                self._lose(f"it could not be renewed for {RENEW_SECONDS:g} s")

    async def release(self) -> None:
        """Release the Lease, so that another operator can take it at once. Call this after `keep` has ended."""
        if not self.is_leader:
            return
        self.is_leader = False
        try:
            found = await self._api.get(LEASE, self._namespace, self._name)
            if found is not None and found["spec"].get("holderIdentity") == self._holder:
                await self._api.replace(found | {"spec": {**found["spec"], "holderIdentity": "", "renewTime": _now()}})
        except (NexrlError, aiohttp.ClientError, OSError) as error:
            log.warning("cannot release the Lease; it will expire: %s", error)

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
        # The write contains the resourceVersion that was read, so only one of several concurrent writers succeeds.
        await self._api.replace(found | {"metadata": metadata, "spec": self._spec(acquired or _now(), transitions)})
        return True

    def _lose(self, why: str) -> NoReturn:
        self.is_leader = False
        raise LeadershipLostError(f"Lease {self._name}: {why}")

    async def _owners(self) -> list[dict[str, Any]]:
        """Return the owner reference to the Deployment, or an empty list if there is no Deployment.

        Without an owner, a deleted release would leave a Lease with an unknown holder.
        """
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
