"""The state machine of one model tag: the replicas, the committed version, and at most one running sync.

Nothing here waits, sends or reads a clock: the caller passes the time (`now`, monotonic seconds) and acts on the
returned values. Invariants:
  - a replica is ready only when the version and digest that it holds are the committed ones;
  - the epoch never decreases; the committed version decreases only if the trainer's ledger lost steps (`forget_above`);
  - at most one sync runs; it and a validation hold have deadlines: `next_deadline` and `expire` end them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from nexrl.errors import FailedPreconditionError, LeaseLostError, NotFoundError
from nexrl_weight_sync.records import NO_VERSION, Cause, Member, Outcome, Replica, Rules, State, Sync, Weights
from nexrl_weight_sync.route import choose_route


@dataclass
class _Group:
    """The members of the current epoch, and whether the trainer's broadcast group is known to be complete."""

    epoch: int
    members: tuple[tuple[str, int], ...] = ()
    is_intact: bool = False


@dataclass
class _Progress:
    """The running sync."""

    sync: Sync
    evicted: list[str] = field(default_factory=list)
    is_verifying: bool = False


class Coordinator:
    """See the module. Methods return whether they changed something; the caller then stores `state` and wakes waits."""

    def __init__(self, rules: Rules, state: State, now: float) -> None:
        self._rules = rules
        self._committed = state.committed
        self._offered_version = state.committed.policy_version
        self._group = _Group(state.epoch)
        self._serial = 0
        self._members: dict[str, Member] = {}
        self._progress: _Progress | None = None
        self._outcome: Outcome | None = None
        self._held_version = state.held_version
        self._hold_until = now + rules.hold_seconds
        for replica in state.replicas:
            self._enter(replica, now)

    # Reading.

    @property
    def state(self) -> State:
        """The state to store."""
        replicas = tuple(replace(member.replica, holds=Weights()) for member in self.members)
        return State(self._committed, self._group.epoch, self._held_version, replicas)

    @property
    def members(self) -> tuple[Member, ...]:
        """The living replicas, by name."""
        return tuple(self._members[replica_id] for replica_id in sorted(self._members))

    @property
    def committed(self) -> Weights:
        """The committed version."""
        return self._committed

    @property
    def held_version(self) -> int:
        """The version held for validation; -1 for none."""
        return self._held_version

    @property
    def sync(self) -> Sync | None:
        """The running sync, or None."""
        return self._progress.sync if self._progress else None

    @property
    def last_outcome(self) -> Outcome | None:
        """How the last sync ended."""
        return self._outcome

    def is_ready(self, member: Member) -> bool:
        """True if the member may receive requests."""
        return self._committed.policy_version != NO_VERSION and member.replica.holds == self._committed

    def gate(self) -> str:
        """Return why rollouts must wait before they take work; empty if they may take it.

        A validation hold does not close the gate: validation rollouts pass the same gate, and the credit bounds the
        others.
        """
        if self._committed.policy_version == NO_VERSION:
            return "no policy version has been committed yet"
        if self._rules.max_lag_steps is None:
            return ""
        if not any(map(self.is_ready, self.members)):
            return f"no replica serves the committed version {self._committed.policy_version}"
        if self._held_version != NO_VERSION:
            return ""
        lag_steps = self._offered_version - self._committed.policy_version
        return f"version {self._offered_version} is being synced" if lag_steps > self._rules.max_lag_steps else ""

    # Replicas.

    def register(self, replica: Replica, now: float) -> bool:
        """Register a replica, or renew its lease. Returns True if more than the lease changed."""
        known = self._members.get(replica.replica_id)
        if known is None:
            self._enter(replica, now)
            return True
        if _is_other_process(known.replica, replica):
            self.remove(replica.replica_id, "it was restarted")
            self._enter(replica, now)
            return True
        if replica.holds.policy_version < known.replica.holds.policy_version:
            # It was sent before the last commit: the versions of one process only grow.
            replica = known.replica
        self._members[replica.replica_id] = replace(known, replica=replica, lease_until=now + self._rules.lease_seconds)
        return replica != known.replica

    def remove(self, replica_id: str, reason: str) -> bool:
        """Evict a replica. Returns True if it was a member.

        A transfer that it takes part in ends, because the other members would wait for it.
        """
        member = self._members.pop(replica_id, None)
        if member is None:
            return False
        if self._progress is not None and _is_among(member, self._progress.sync.members):
            self._progress.evicted.append(replica_id)
            if not self._progress.is_verifying:
                self._end(Cause.REPLICA_LEFT, f"replica {replica_id}: {reason}")
        return True

    def evict(self, member: Member, reason: str) -> bool:
        """Evict this stay of a replica, but not a later stay of the same id. Returns True if it was a member."""
        return _is_among(member, self.members) and self.remove(member.replica_id, reason)

    # The sync: offer -> begin -> verify -> commit, or abort anywhere.

    def offer(self, weights: Weights) -> bool:
        """Note the version that the trainer wants to publish. Returns True if that changes something.

        Raises LeaseLostError for a version below the committed one: the trainer replays steps.
        """
        if weights.policy_version < self._committed.policy_version:
            raise LeaseLostError(
                f"version {weights.policy_version} is older than the committed version {self._committed.policy_version}"
            )
        has_changed = weights.policy_version != self._offered_version
        self._offered_version = weights.policy_version
        return has_changed

    def forget_above(self, newest_version: int) -> bool:
        """Forget a committed version above `newest_version`, because the ledger has lost the steps that led to it.

        No trainer can make that version again, and replicas that serve it are not ready. Returns True if there was one.
        """
        if self._committed.policy_version <= newest_version:
            return False
        if self._progress is not None:
            self._end(Cause.SUPERSEDED, "what the trainer's ledger has lost is forgotten")
        self._committed, self._offered_version, self._held_version = Weights(), NO_VERSION, NO_VERSION
        return True

    def waiting_on(self, weights: Weights) -> str:
        """Return why a sync of `weights` cannot begin, "validation" or "replicas"; empty if it can.

        The held version itself may be published again: validation could not end if its last replica were lost.
        """
        if self._held_version not in (NO_VERSION, weights.policy_version):
            return "validation"
        if not self._members or (self._progress is not None and self._progress.is_verifying):
            return "replicas"
        return ""

    def begin(self, request_id: str, weights: Weights, open_epoch: int, now: float, trainer_gpu: str = "") -> Sync:
        """Begin a sync with all living replicas. A sync in transfer is aborted, unless it belongs to the same request.

        The route depends only on the settings and on what the trainer and the members said of their GPUs when they
        started, so it does not change within an epoch.

        A new epoch begins when the membership changed, the trainer has no open group, or the last transfer failed.
        """
        waiting_on = self.waiting_on(weights)
        if waiting_on:
            raise FailedPreconditionError(f"a sync of version {weights.policy_version} waits on {waiting_on}")
        if self._progress is not None and self._progress.sync.request_id == request_id:
            return self._progress.sync
        if self._progress is not None:
            self._end(Cause.SUPERSEDED, "the trainer began another sync")
        self._regroup(open_epoch)
        sync_id = f"{weights.policy_version}-{self._group.epoch}-{request_id}"
        gpus = {member.replica_id: member.replica.gpu for member in self.members}
        route = choose_route(self._rules.transport, trainer_gpu, gpus)
        deadline = now + self._rules.sync_seconds
        sync = Sync(sync_id, request_id, weights, self._group.epoch, self.members, deadline, route)
        self._progress = _Progress(sync)
        self._group.is_intact = False  # until its transfer is known to have ended well
        return sync

    def outcome(self, sync_id: str) -> Outcome | None:
        """Return how the sync ended; None while it runs. Raises NotFoundError if it neither runs nor was the last."""
        if self._outcome is not None and self._outcome.sync_id == sync_id:
            return self._outcome
        self._progress_of(sync_id)
        return None

    def start_verifying(self, sync_id: str, now: float) -> None:
        """Note that the trainer has sent everything. From now on a failing replica is evicted; the sync continues."""
        progress = self._progress_of(sync_id)
        progress.is_verifying = True
        progress.sync = replace(progress.sync, deadline=now + self._rules.sync_seconds)

    def verify(self, sync_id: str, digests: Mapping[str, str]) -> tuple[Member, ...]:
        """Return the living members that hold what was sent. Evicts those with another digest, or none."""
        sync = self._progress_of(sync_id).sync
        for member in self._still_here(sync.members):
            if digests.get(member.replica_id) != sync.weights.digest:
                self.remove(member.replica_id, "it does not hold the weights that were sent")
        return self._still_here(sync.members)

    def commit(self, sync_id: str, served_ids: Collection[str], now: float) -> Outcome:
        """Commit the version if at least one member serves it. Evicts the members that do not."""
        sync = self._progress_of(sync_id).sync
        is_served = False
        for member in self._still_here(sync.members):
            if member.replica_id in served_ids:
                is_served, known = True, self._members[member.replica_id]
                self._members[member.replica_id] = replace(known, replica=replace(known.replica, holds=sync.weights))
            else:
                self.remove(member.replica_id, "it does not serve the weights that were sent")
        if not is_served:
            return self._end(Cause.NOT_TAKEN, "no replica took the weights")
        self._group.is_intact = True
        policy_version = sync.weights.policy_version
        if policy_version > self._committed.policy_version and self._rules.is_due(policy_version):
            self._held_version, self._hold_until = policy_version, now + self._rules.hold_seconds
        self._committed = sync.weights
        return self._end(None, "")

    def abort(self, sync_id: str, cause: Cause, reason: str) -> Outcome:
        """End the sync without a commit; its members stay. Raises NotFoundError if it does not run."""
        self._progress_of(sync_id)
        return self._end(cause, reason)

    # Validation and time.

    def end_hold(self, policy_version: int) -> bool:
        """End the validation hold of this version. Returns True if it was held."""
        if policy_version == NO_VERSION or policy_version != self._held_version:
            return False
        self._held_version = NO_VERSION
        return True

    def expire(self, now: float) -> tuple[str, ...]:
        """End everything whose deadline has passed. Returns a reason for each."""
        expired = [member.replica_id for member in self.members if member.lease_until <= now]
        for replica_id in expired:
            self.remove(replica_id, "it is silent")
        reasons = [f"replica {replica_id} is silent" for replica_id in expired]
        if self._progress is not None and self._progress.sync.deadline <= now:
            reasons.append(f"sync {self._progress.sync.sync_id} took too long")
            self._end(Cause.TOO_LATE, "it took too long")
        if self._held_version != NO_VERSION and self._hold_until <= now:
            reasons.append(f"the validation of version {self._held_version} took too long")
            self._held_version = NO_VERSION
        return tuple(reasons)

    def next_deadline(self) -> float | None:
        """Return the next time at which `expire` has something to do, unless the state changes first."""
        deadlines = [member.lease_until for member in self._members.values()]
        if self._progress is not None:
            deadlines.append(self._progress.sync.deadline)
        if self._held_version != NO_VERSION:
            deadlines.append(self._hold_until)
        return min(deadlines, default=None)

    def _enter(self, replica: Replica, now: float) -> None:
        self._serial += 1
        self._members[replica.replica_id] = Member(replica, self._serial, now + self._rules.lease_seconds)

    def _regroup(self, open_epoch: int) -> None:
        members = tuple((member.replica_id, member.serial) for member in self.members)
        if members != self._group.members or open_epoch != self._group.epoch or not self._group.is_intact:
            # The trainer's epoch may be higher if Redis lost its last writes. An epoch must never name two groups.
            self._group = _Group(max(self._group.epoch, open_epoch) + 1, members)

    def _still_here(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        return tuple(member for member in members if _is_among(member, self.members))

    def _progress_of(self, sync_id: str) -> _Progress:
        if self._progress is None or self._progress.sync.sync_id != sync_id:
            raise NotFoundError(f"sync {sync_id!r} is not running; begin another")
        return self._progress

    def _end(self, cause: Cause | None, reason: str) -> Outcome:
        assert self._progress is not None
        self._outcome = Outcome(self._progress.sync.sync_id, cause, reason, tuple(self._progress.evicted))
        self._progress = None
        return self._outcome


def _is_other_process(known: Replica, replica: Replica) -> bool:
    """Return True for a process that was restarted under the same id: it has no weights, or another address."""
    has_lost_weights = known.holds.policy_version != NO_VERSION and replica.holds.policy_version == NO_VERSION
    return has_lost_weights or replace(known, holds=replica.holds) != replica


def _is_among(member: Member, members: Collection[Member]) -> bool:
    return any((other.replica_id, other.serial) == (member.replica_id, member.serial) for other in members)
