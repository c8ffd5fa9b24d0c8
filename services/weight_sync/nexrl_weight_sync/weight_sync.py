"""Weight sync of one model tag: the coordinator with its store, its replicas, and the calls that wait."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

from nexrl.errors import NexrlError, NotFoundError
from nexrl.weights.manifest import Manifest
from nexrl.weights.rendezvous import Rendezvous
from nexrl_weight_sync import metrics
from nexrl_weight_sync.change import Change
from nexrl_weight_sync.coordinator import Coordinator
from nexrl_weight_sync.records import NO_VERSION, Cause, Member, Outcome, Replica, Sync, Weights
from nexrl_weight_sync.replicas import ReplicaClients, TransferInterruptedError
from nexrl_weight_sync.route import Route
from nexrl_weight_sync.store import WeightSyncStore

log = logging.getLogger(__name__)

REPEAT_SECONDS = 5.0
"""Time after which the committed version is sent to the pool again."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Offer:
    """A version that the trainer wants to publish, and where its TCP store listens."""

    request_id: str
    manifest: Manifest
    host: str
    port: int
    open_epoch: int
    newest_version: int | None = None
    """After a resume: the newest version that the train batches of the ledger lead to."""
    gpu: str = ""
    """UUID of the GPU from whose memory the trainer can send by NCCL; empty for host memory only."""

    @property
    def weights(self) -> Weights:
        """Version and digest."""
        return Weights(self.manifest.policy_version, self.manifest.digest)


@dataclass(frozen=True)
class View:
    """The replicas at one moment, each with whether it is ready, and the gate."""

    replicas: tuple[tuple[Replica, bool], ...]
    committed_version: int
    gate: str
    """Why rollouts must wait before they take work; empty if they may take it."""


@dataclass(frozen=True)
class _Transfer:
    """The running ReceiveWeights calls of a sync: by member, the digest of what it received, or "" if it failed."""

    sync: Sync
    digests: dict[str, asyncio.Task[str]]
    began: float


class WeightSync:
    """Serves concurrent calls. Waits end after their `wait_seconds`, or with `stop`."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: WeightSyncStore,
        clients: ReplicaClients,
        *,
        timeout_seconds: float,
        clock: Clock = time.monotonic,
    ) -> None:
        """`timeout_seconds`: how long a member of a sync waits for a silent peer. `clock` returns monotonic seconds."""
        self._coordinator = coordinator
        self._store = store
        self._saved = coordinator.state
        self._saving = asyncio.Lock()
        self._clients = clients
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._change = Change()
        self._transfer: _Transfer | None = None
        self._logged_route: Route | None = None
        self._commits: dict[str, asyncio.Task[Outcome]] = {}
        metrics.COMMITTED_VERSION.set(coordinator.committed.policy_version)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, for reading only."""
        return self._coordinator

    # Replicas.

    async def register(self, replica: Replica) -> None:
        """Register a replica, or renew its lease."""
        if self._coordinator.register(replica, self._clock()):
            await self._settle()

    async def deregister(self, replica_id: str) -> None:
        """Remove a replica."""
        if self._coordinator.remove(replica_id, "it left"):
            await self._settle()

    def view(self) -> View:
        """Return the view now."""
        members = self._coordinator.members
        replicas = tuple((member.replica, self._coordinator.is_ready(member)) for member in members)
        return View(replicas, self._coordinator.committed.policy_version, self._coordinator.gate())

    async def watch(self) -> AsyncIterator[View]:
        """Yield the view, and again at each change."""
        sent: View | None = None
        while await self._change.until(lambda sent=sent: self.view() != sent):  # type: ignore[misc]
            sent = self.view()
            yield sent

    # The transaction.

    async def prepare(self, offer: Offer, wait_seconds: float) -> Sync | str:
        """Begin a sync and have the replicas receive. Returns the sync; if the wait ends first, what it waits on.

        Raises LeaseLostError for a version below the committed one.
        """
        began = self._clock()
        if offer.newest_version is not None and self._coordinator.forget_above(offer.newest_version):
            log.warning("the ledger leads to version %d only: later ones are forgotten", offer.newest_version)
            await self._settle()
        if self._coordinator.offer(offer.weights):
            self._change.notify()
        if not await self._change.until(lambda: not self._coordinator.waiting_on(offer.weights), wait_seconds):
            return self._coordinator.waiting_on(offer.weights)
        sync = self._coordinator.begin(offer.request_id, offer.weights, offer.open_epoch, self._clock(), offer.gpu)
        await self._settle()  # store the epoch before a member uses it
        if self._coordinator.sync is sync and self._transfer is None:
            self._log_route(sync.route)
            self._transfer = self._begin_transfer(sync, offer)
            metrics.WEIGHT_BYTES.set(offer.manifest.nbytes)
            metrics.PHASE_SECONDS.labels("prepare").observe(self._clock() - began)
        return sync

    async def commit(self, sync_id: str, *, transferred: bool) -> Outcome:
        """Verify the digests and commit on the members that hold the version. A repeated call returns the same outcome.

        Raises NotFoundError for a sync that neither runs nor was the last one.
        """
        if sync_id not in self._commits:
            known = self._coordinator.outcome(sync_id)
            if known is not None:
                return known
            # In a task of its own: a caller that disconnects must not leave a sync half committed.
            commit = asyncio.create_task(self._commit(sync_id, transferred))
            commit.add_done_callback(lambda _: self._commits.pop(sync_id))
            self._commits[sync_id] = commit
        return await asyncio.shield(self._commits[sync_id])

    # The gate and validation.

    async def check_gate(self, wait_seconds: float) -> str:
        """Return why rollouts must still wait at the end of `wait_seconds`; returns empty as soon as they need not."""
        await self._change.until(lambda: not self._coordinator.gate(), wait_seconds)
        return self._coordinator.gate()

    async def wait_for_validation(self, wait_seconds: float) -> int:
        """Return the version that is held for validation; -1 if none is within `wait_seconds`."""
        await self._change.until(lambda: self._coordinator.held_version != NO_VERSION, wait_seconds)
        return self._coordinator.held_version

    async def end_hold(self, policy_version: int) -> None:
        """End the validation hold of `policy_version`, so that the next sync can begin."""
        if self._coordinator.end_hold(policy_version):
            await self._settle()

    # Background work, and its end.

    async def expire(self) -> None:
        """End leases, syncs and holds at their deadlines, until the task is cancelled."""
        while not self._change.is_closed:
            deadline = self._coordinator.next_deadline()
            await self._change.once(None if deadline is None else max(0.0, deadline - self._clock()))
            reasons = self._coordinator.expire(self._clock())
            for reason in reasons:
                log.warning("expired: %s", reason)
            if reasons:
                await self._settle()

    async def announce(self, tell: Callable[[int], Awaitable[None]]) -> None:
        """Call `tell` with each committed version at once, and with the newest again every REPEAT_SECONDS."""
        while not self._change.is_closed:
            told = self._coordinator.committed.policy_version
            if told != NO_VERSION:
                await tell(told)
            # Again, because a Redis that failed over may have lost the version.
            await self._change.until(lambda: self._coordinator.committed.policy_version != told, REPEAT_SECONDS)  # noqa: B023

    async def stop(self) -> None:
        """End all waits and the calls of a running sync."""
        self._change.close()
        self._drop_transfer()
        await self._clients.close()

    def _begin_transfer(self, sync: Sync, offer: Offer) -> _Transfer:
        digests = {}
        for rank, member in enumerate(sync.members, start=1):
            rendezvous = Rendezvous(
                *(sync.epoch, offer.host, offer.port, rank, len(sync.members) + 1, self._timeout_seconds),
                sync.route.transport,
            )
            digests[member.replica_id] = asyncio.create_task(self._receive(sync, member, rendezvous, offer.manifest))
        return _Transfer(sync, digests, self._clock())

    def _log_route(self, route: Route) -> None:
        if route != self._logged_route:
            log.info("weights travel by %s: %s", route.transport, route.reason)
            self._logged_route = route

    async def _receive(self, sync: Sync, member: Member, rendezvous: Rendezvous, manifest: Manifest) -> str:
        try:
            return await self._clients.receive(member.replica.address, sync.sync_id, rendezvous, manifest)
        except TransferInterruptedError as error:
            log.warning("replica %s: %s", member.replica_id, error)
        except NexrlError as error:
            await self._evict(member, str(error))
        return ""

    async def _commit(self, sync_id: str, transferred: bool) -> Outcome:
        transfer = self._transfer
        if transfer is None or transfer.sync.sync_id != sync_id:
            raise NotFoundError(f"sync {sync_id!r} is not running; begin another")
        began = self._clock()
        metrics.PHASE_SECONDS.labels("transfer").observe(began - transfer.began)
        try:
            if transferred:
                self._coordinator.start_verifying(sync_id, began)
                outcome = await self._verify_and_commit(transfer)
            else:
                outcome = self._coordinator.abort(sync_id, Cause.BROADCAST_FAILED, "the trainer's broadcast failed")
        except BaseException as error:
            if self._coordinator.sync is not None and self._coordinator.sync.sync_id == sync_id:
                self._coordinator.abort(sync_id, Cause.NOT_TAKEN, f"the commit failed: {error}")
            raise
        finally:
            await self._settle()
        return outcome

    async def _verify_and_commit(self, transfer: _Transfer) -> Outcome:
        sync_id, began = transfer.sync.sync_id, self._clock()
        digests = dict(zip(transfer.digests, await asyncio.gather(*transfer.digests.values()), strict=True))
        wrong = [name for name, digest in digests.items() if digest not in ("", transfer.sync.weights.digest)]
        if wrong:
            metrics.DIGEST_MISMATCHES.inc(len(wrong))
            log.error("sync %s: other bytes arrived than were sent at %s", sync_id, ", ".join(wrong))
        holders = self._coordinator.verify(sync_id, digests)
        verified = self._clock()
        metrics.PHASE_SECONDS.labels("verify").observe(verified - began)
        served = await asyncio.gather(*(self._serve(transfer.sync, member) for member in holders))
        served_ids = [member.replica_id for member, is_served in zip(holders, served, strict=True) if is_served]
        if served_ids:
            # Store first: no client may learn of a version that a restart would lose.
            await self._save(committed=transfer.sync.weights)
        outcome = self._coordinator.commit(sync_id, served_ids, self._clock())
        metrics.PHASE_SECONDS.labels("commit").observe(self._clock() - verified)
        return outcome

    async def _serve(self, sync: Sync, member: Member) -> bool:
        try:
            await self._clients.commit(member.replica.address, sync.sync_id, sync.weights.policy_version)
        except NexrlError as error:
            await self._evict(member, str(error))
            return False
        return True

    async def _evict(self, member: Member, reason: str) -> None:
        log.warning("replica %s is evicted: %s", member.replica_id, reason)
        if self._coordinator.evict(member, reason):
            await self._settle()

    async def _settle(self) -> None:
        """Apply the coordinator's decisions: end the calls of a finished sync, store the state, wake waits."""
        sync = self._coordinator.sync
        if self._transfer is not None and (sync is None or sync.sync_id != self._transfer.sync.sync_id):
            self._drop_transfer()
        metrics.COMMITTED_VERSION.set(self._coordinator.committed.policy_version)
        try:
            await self._clients.keep_only({member.replica.address for member in self._coordinator.members})
            await self._save()
        finally:
            self._change.notify()

    async def _save(self, committed: Weights | None = None) -> None:
        async with self._saving:
            state = self._coordinator.state
            if committed is not None:
                state = replace(state, committed=committed)
            if state != self._saved:
                await self._store.save(state)
                self._saved = state

    def _drop_transfer(self) -> None:
        if self._transfer is None:
            return
        for task in self._transfer.digests.values():
            if task is not asyncio.current_task():
                task.cancel()
        outcome = self._coordinator.last_outcome
        if outcome is not None and outcome.sync_id == self._transfer.sync.sync_id and outcome.cause is not None:
            metrics.ABORTED.labels(outcome.cause).inc()
            log.warning("sync %s ended without a commit: %s", outcome.sync_id, outcome.reason)
        self._transfer = None
