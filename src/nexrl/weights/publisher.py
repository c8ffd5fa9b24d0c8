"""The trainer's side of weight sync: prepares, broadcasts and commits a version, and again for replicas that join."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from nexrl.errors import LeaseLostError, NexrlError, NotFoundError, UnavailableError
from nexrl.rpc.client import call, is_passing, new_request_id, watch
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.weights.manifest_proto import manifest_to_wire
from nexrl.weights.packing import Snapshot
from nexrl.weights.published import PublishedVersions
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.rendezvous_proto import rendezvous_from_wire
from nexrl.weights.transport import Sender

if TYPE_CHECKING:
    from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceAsyncStub

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
WAIT_SECONDS = 30.0
MARGIN_SECONDS = 10.0
FIRST_BACKOFF_SECONDS = 0.05
REPUBLISH_SECONDS = 1.0
CATCH_UP_SECONDS = 10.0
"""Time for a replica to read the committed version from the shared folder, before it is broadcast again to all."""


TakeSnapshot: TypeAlias = Callable[[int, Snapshot | None, torch.device], Awaitable[Snapshot]]
"""Returns a packed copy of the weights in buckets of so many bytes, on the device unless its memory is full.

It may reuse the memory of the given copy.
"""


@dataclass(frozen=True)
class Publication:
    """Result of a publish. `committed_version` is above `policy_version` if a newer version was committed first."""

    policy_version: int
    committed_version: int
    nbytes: int
    attempts: int
    seconds: float


class WeightPublisher:
    """Publishes versions of one model tag, one at a time.

    It broadcasts a packed copy of the newest version and keeps the copy: in host memory, or on the GPU while the open
    group uses NCCL. So training may change the
    weights meanwhile, and a replica that joins later can get the version at any time. With a shared folder, each
    committed version is also written there, and is broadcast again only if a replica did not read it from there.
    """

    def __init__(
        self,
        stub: "WeightSyncServiceAsyncStub",
        sender: Sender,
        *,
        model_tag: str,
        bucket_bytes: int,
        timeout_seconds: float,
        published: PublishedVersions | None = None,
    ) -> None:
        """`bucket_bytes` and `timeout_seconds` (of a sync) are those of spec.weightSync. `close` closes the sender."""
        self._stub = stub
        self._sender = sender
        self._model_tag = model_tag
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._published = published
        self.newest_version: int | None = None
        """Set after a resume, for the next `publish`: the newest version that the ledger's steps can lead to."""
        self._one_at_a_time = asyncio.Lock()
        self._snapshot: Snapshot | None = None
        self._replicas = pb.WatchReplicasResponse(committed_version=-1)
        self._replicas_changed = asyncio.Event()
        self._views = 0
        self._sync_id = ""
        self._unshared: Snapshot | None = None
        self._has_unshared = asyncio.Event()

    async def publish(self, take: TakeSnapshot) -> Publication:
        """Publish the policy version that `take` returns. Returns when at least one replica serves it.

        Waits without limit for a replica, and for the end of a validation. Raises UnavailableError after MAX_ATTEMPTS
        failed transfers.
        """
        began = time.monotonic()
        async with self._one_at_a_time:
            # Reuse the memory of the previous copy, unless it may still be being written to the shared folder.
            replaced = self._snapshot if self._published is None else None
            if replaced is not None:
                self._snapshot = None
            # A copy on the GPU could not be reused, so there would be two: what is written to a folder is on the host.
            device = self._sender.device if self._published is None else torch.device("cpu")
            self._snapshot = packed = await take(self._bucket_bytes, replaced, device)
            committed_version, attempts = await self._publish(packed)
            self.newest_version = None
        seconds = time.monotonic() - began
        manifest = packed.manifest
        return Publication(manifest.policy_version, committed_version, manifest.nbytes, attempts, seconds)

    async def keep_replicas_current(self) -> None:
        """Follow the replicas until the task is cancelled. Run it in the background of the training loop.

        A replica that joined or lost its weights gets the committed version again, also while the loop waits for a
        batch: in mode sync, nothing else would end that wait. A transfer is aborted at once if a member is gone.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_replicas())
            tasks.create_task(self._republish())
            tasks.create_task(self._share())

    async def close(self) -> None:
        """Leave the broadcast group and stop listening."""
        await asyncio.to_thread(self._sender.close)

    async def _publish(self, packed: Snapshot) -> tuple[int, int]:
        """Retry until this version, or a newer one, is committed. Return that version and the number of attempts."""
        version, reason = packed.manifest.policy_version, ""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                answer = await self._attempt(packed, wait_seconds=WAIT_SECONDS)
            except NexrlError as error:
                if not _is_retriable(error):
                    raise
                reason = str(error)
            else:
                if answer.committed_version > version or (answer.committed and answer.committed_version == version):
                    return answer.committed_version, attempt
                reason = answer.reason
            log.warning("attempt %d to publish version %d failed: %s", attempt, version, reason)
            await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2**attempt)
        raise UnavailableError(
            f"version {version} could not be published in {MAX_ATTEMPTS} attempts; last error: {reason}"
        )

    async def _attempt(self, packed: Snapshot, *, wait_seconds: float) -> pb.CommitSyncResponse:
        """Make one sync, from prepare to commit. With `wait_seconds` 0, give up if it cannot begin at once."""
        views = self._views
        while True:
            try:
                prepared = await self._prepare(packed, wait_seconds)
            except LeaseLostError as superseded:
                log.info("%s", superseded)
                return pb.CommitSyncResponse(committed_version=(await self._state()).committed_version)
            if prepared.sync_id:
                return await self._commit(packed, prepared, views)
            log.info("version %d waits on %s", packed.manifest.policy_version, prepared.waiting_on)
            if wait_seconds == 0:
                return pb.CommitSyncResponse(reason=f"waits on {prepared.waiting_on}")

    async def _prepare(self, packed: Snapshot, wait_seconds: float) -> pb.PrepareSyncResponse:
        request = pb.PrepareSyncRequest(
            request_id=new_request_id(),
            model_tag=self._model_tag,
            manifest=manifest_to_wire(packed.manifest),
            host=self._sender.host,
            port=self._sender.port,
            open_epoch=self._sender.open_epoch,
            wait_seconds=wait_seconds,
            newest_version=self.newest_version,
            gpu=self._sender.gpu.uuid if self._sender.gpu else "",
        )
        return await call(self._stub.PrepareSync, request, timeout_seconds=wait_seconds + MARGIN_SECONDS)

    async def _commit(self, packed: Snapshot, prepared: pb.PrepareSyncResponse, views: int) -> pb.CommitSyncResponse:
        self._sync_id = prepared.sync_id
        try:
            if self._views != views:  # the replicas changed before `_sync_id` was set: a member may be gone
                await self._call_off_broken_transfer()
            transferred = await self._broadcast(packed, rendezvous_from_wire(prepared.rendezvous))
        finally:
            self._sync_id = ""
        request = pb.CommitSyncRequest(
            request_id=new_request_id(), model_tag=self._model_tag, sync_id=prepared.sync_id, transferred=transferred
        )
        # Twice the timeout: once to finish receiving, and once to load the weights.
        answer = await call(self._stub.CommitSync, request, timeout_seconds=2 * self._timeout_seconds + MARGIN_SECONDS)
        if answer.committed and self._published is not None:
            # Written after the broadcast: writing at the same time made the broadcast 1.5 times as long.
            self._unshared = packed
            self._has_unshared.set()
        return answer

    async def _broadcast(self, packed: Snapshot, rendezvous: Rendezvous) -> bool:
        if not self._sync_id:
            return False
        group = self._sender.group(rendezvous)
        try:
            await asyncio.to_thread(group.send, packed.buffers)
        except UnavailableError as error:
            log.warning("%s", error)
            return False
        except asyncio.CancelledError:
            group.abort()
            raise
        return True

    async def _follow_replicas(self) -> None:
        request = pb.WatchReplicasRequest(model_tag=self._model_tag)
        async for replicas in watch(self._stub.WatchReplicas, request):
            self._replicas = replicas
            self._views += 1
            self._replicas_changed.set()
            if self._sync_id:
                await self._call_off_broken_transfer()

    async def _call_off_broken_transfer(self) -> None:
        """Abort the transfer if a member is gone. Otherwise the other members would wait for it until their timeout."""
        sync_id = self._sync_id
        state = await self._state()
        if state.sync_id != sync_id and self._sync_id == sync_id:
            log.warning("sync %s ended before its transfer: a member is gone", sync_id)
            self._sync_id = ""
            self._sender.close_group()

    async def _share(self) -> None:
        """Write committed versions to the shared folder. If they come faster than it can write, only the newest."""
        while self._published is not None:
            await self._has_unshared.wait()
            self._has_unshared.clear()
            packed, self._unshared = self._unshared, None
            assert packed is not None
            try:
                await asyncio.to_thread(self._published.write, packed)
            except UnavailableError as error:
                log.warning("%s", error)

    async def _republish(self) -> None:
        while True:
            await self._replicas_changed.wait()
            self._replicas_changed.clear()
            if self._published is not None and not await self._has_replica_that_stays_stale():
                continue
            if not await self._serve_stale_replicas():
                # Retry: a failure does not always change the replicas, so nothing else may wake this loop.
                await asyncio.sleep(REPUBLISH_SECONDS)
                self._replicas_changed.set()

    async def _has_replica_that_stays_stale(self) -> bool:
        """Return whether a replica that lacks the version still lacks it after CATCH_UP_SECONDS."""
        stale = self._stale_replica_ids()
        if not stale:
            return False
        await asyncio.sleep(CATCH_UP_SECONDS)
        stale_now = self._stale_replica_ids()
        if stale_now - stale:  # replicas that joined meanwhile have the same time
            self._replicas_changed.set()
        return bool(stale_now & stale)

    async def _serve_stale_replicas(self) -> bool:
        """Publish the committed version again if a replica lacks it. Return False if that failed."""
        async with self._one_at_a_time:
            packed = self._snapshot
            if packed is None or not self._stale_replica_ids():
                return True
            log.info("publishing version %d again for a replica that lacks it", packed.manifest.policy_version)
            try:
                answer = await self._attempt(packed, wait_seconds=0)
            except NexrlError as error:
                log.warning("version %d could not be published again: %s", packed.manifest.policy_version, error)
                return False
            return answer.committed

    def _stale_replica_ids(self) -> set[str]:
        """Return the replicas that need the version in memory."""
        # committed_version is lower if the Redis of weight sync lost its last writes. Then no replica is ready.
        if self._snapshot is None or self._replicas.committed_version > self._snapshot.manifest.policy_version:
            return set()
        return {replica.replica_id for replica in self._replicas.replicas if not replica.ready}

    async def _state(self) -> pb.GetWeightSyncStateResponse:
        request = pb.GetWeightSyncStateRequest(model_tag=self._model_tag)
        return await call(self._stub.GetWeightSyncState, request, timeout_seconds=MARGIN_SECONDS)


def _is_retriable(error: NexrlError) -> bool:
    """Return whether another attempt may succeed: a peer was gone, or weight sync restarted and lost the sync."""
    return is_passing(error) or isinstance(error, NotFoundError)
