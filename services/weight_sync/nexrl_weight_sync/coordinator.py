"""The state machine of one model tag: the replicas, the committed version, and the one sync that may be on.

Nothing here waits, sends or reads a clock: the caller brings the time (`now`, monotonic seconds) and does what the
answers say. What holds at every moment:
  - a replica is ready only when the version and digest that it holds are the committed ones;
  - the epoch never goes back, nor does the committed version, except where the trainer's ledger has (`forget_above`);
  - at most one sync is on, it has a deadline, and so has a validation hold: `next_deadline` and `expire` end them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nexrl.errors import FailedPreconditionError, LeaseLostError, NotFoundError

NO_VERSION = -1


@dataclass(frozen=True)
class Rules:
    """What the experiment asks for.

    `max_lag_steps`: versions that the committed one may lag behind the newest offered one before rollouts must wait;
    None for any. `is_due`: whether a version is to be validated. Times in seconds.
    """

    max_lag_steps: int | None
    lease_seconds: float
    sync_seconds: float
    hold_seconds: float
    is_due: Callable[[int], bool]


@dataclass(frozen=True)
class Weights:
    """A policy version and the digest of its bytes; -1 and empty for none."""

    policy_version: int = NO_VERSION
    digest: str = ""


@dataclass(frozen=True)
class Replica:
    """A replica as it describes itself. `holds`: the weights that it serves.

    `token_address`: where clients with a token are served, instead of a certificate.
    """

    replica_id: str
    address: str
    http_url: str
    holds: Weights
    token_address: str = ""


@dataclass(frozen=True)
class Member:
    """A living replica. `serial` differs between two stays of the same replica id."""

    replica: Replica
    serial: int
    lease_until: float

    @property
    def replica_id(self) -> str:
        """Name of the replica."""
        return self.replica.replica_id


@dataclass(frozen=True)
class Sync:
    """A sync that is on. `members[i]` has rank i + 1; the trainer has rank 0."""

    sync_id: str
    request_id: str
    weights: Weights
    epoch: int
    members: tuple[Member, ...]
    deadline: float


class Cause(StrEnum):
    """Why a sync ended without a commit."""

    REPLICA_LEFT = "replica_left"
    BROADCAST_FAILED = "broadcast_failed"
    NOT_TAKEN = "not_taken"
    SUPERSEDED = "superseded"
    TOO_LATE = "too_late"


@dataclass(frozen=True)
class Outcome:
    """How a sync ended. `cause` (None: it was committed) and `reason`, the same for people."""

    sync_id: str
    cause: Cause | None
    reason: str
    evicted: tuple[str, ...]

    @property
    def committed(self) -> bool:
        """True when at least one replica serves the version."""
        return self.cause is None


@dataclass(frozen=True)
class State:
    """What must outlive the process. `held_version`: the version held for validation, or -1.

    What the replicas hold is left out: they may change it while this process is away, so they are asked again.
    """

    committed: Weights = Weights()
    epoch: int = 0
    held_version: int = NO_VERSION
    replicas: tuple[Replica, ...] = ()


@dataclass
class _Group:
    """The members of the current epoch, and whether the trainer's group is known to be whole."""

    epoch: int
    members: tuple[tuple[str, int], ...] = ()
    is_intact: bool = False


@dataclass
class _Progress:
    """The sync that is on."""

    sync: Sync
    evicted: list[str] = field(default_factory=list)
    is_verifying: bool = False


class Coordinator:
    """See the module. Methods that change something say so; the caller stores `state` and wakes who waits."""

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

    # What is so.

    @property
    def state(self) -> State:
        """What must be stored."""
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
        """The sync that is on."""
        return self._progress.sync if self._progress else None

    @property
    def last_outcome(self) -> Outcome | None:
        """How the last sync that was on ended."""
        return self._outcome

    def is_ready(self, member: Member) -> bool:
        """True when the member may be sent requests."""
        return self._committed.policy_version != NO_VERSION and member.replica.holds == self._committed

    def gate(self) -> str:
        """Why rollouts must wait; empty when they may go on.

        A validation hold does not: validation rollouts pass the same gate, and the credit bounds the others.
        """
        if self._committed.policy_version == NO_VERSION:
            return "no policy version has been committed yet"
        if not any(map(self.is_ready, self.members)):
            return f"no replica serves the committed version {self._committed.policy_version}"
        if self._held_version != NO_VERSION or self._rules.max_lag_steps is None:
            return ""
        lag_steps = self._offered_version - self._committed.policy_version
        return f"version {self._offered_version} is being synced" if lag_steps > self._rules.max_lag_steps else ""

    # Replicas.

    def register(self, replica: Replica, now: float) -> bool:
        """Enter a replica, or renew its lease. True when more than a lease changed."""
        known = self._members.get(replica.replica_id)
        if known is None:
            self._enter(replica, now)
            return True
        if _is_other_process(known.replica, replica):
            self.remove(replica.replica_id, "it was restarted")
            self._enter(replica, now)
            return True
        if replica.holds.policy_version < known.replica.holds.policy_version:
            # Sent before the commit that we know of: versions of one process only grow.
            replica = known.replica
        self._members[replica.replica_id] = replace(known, replica=replica, lease_until=now + self._rules.lease_seconds)
        return replica != known.replica

    def remove(self, replica_id: str, reason: str) -> bool:
        """Put a replica out, and end a transfer that it takes part in: the others would wait. True if it was here."""
        member = self._members.pop(replica_id, None)
        if member is None:
            return False
        if self._progress is not None and _is_among(member, self._progress.sync.members):
            self._progress.evicted.append(replica_id)
            if not self._progress.is_verifying:
                self._end(Cause.REPLICA_LEFT, f"replica {replica_id}: {reason}")
        return True

    def evict(self, member: Member, reason: str) -> bool:
        """Put out this stay of a replica; one that has come back since stays. True when it was here."""
        return _is_among(member, self.members) and self.remove(member.replica_id, reason)

    # The sync: offer -> begin -> verify -> commit, or abort anywhere.

    def offer(self, weights: Weights) -> bool:
        """Note the version that the trainer wants to publish. True when that changes something.

        Raises LeaseLostError for a version older than the committed one: a trainer that replays what it lost.
        """
        if weights.policy_version < self._committed.policy_version:
            raise LeaseLostError(
                f"version {weights.policy_version} is older than the committed version {self._committed.policy_version}"
            )
        has_changed = weights.policy_version != self._offered_version
        self._offered_version = weights.policy_version
        return has_changed

    def forget_above(self, newest_version: int) -> bool:
        """Forget a committed version above `newest_version`: the ledger has lost the steps that led to it.

        No trainer can make it any more, and replicas that still serve it are not ready. True when there is one.
        """
        if self._committed.policy_version <= newest_version:
            return False
        if self._progress is not None:
            self._end(Cause.SUPERSEDED, "what the trainer's ledger has lost is forgotten")
        self._committed, self._offered_version, self._held_version = Weights(), NO_VERSION, NO_VERSION
        return True

    def waiting_on(self, weights: Weights) -> str:
        """Why a sync of `weights` cannot begin: "validation" or "replicas"; empty when it can.

        The held version itself may be published again: validation could not end if its last replica were lost.
        """
        if self._held_version not in (NO_VERSION, weights.policy_version):
            return "validation"
        if not self._members or (self._progress is not None and self._progress.is_verifying):
            return "replicas"
        return ""

    def begin(self, request_id: str, weights: Weights, open_epoch: int, now: float) -> Sync:
        """Begin a sync with all living replicas; one in transfer is given up, unless it is the same request's.

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
        sync = Sync(sync_id, request_id, weights, self._group.epoch, self.members, now + self._rules.sync_seconds)
        self._progress = _Progress(sync)
        self._group.is_intact = False  # until its transfer is known to have ended well
        return sync

    def outcome(self, sync_id: str) -> Outcome | None:
        """How the sync ended, if it was the last to end. Raises NotFoundError for one that is neither on nor that."""
        if self._outcome is not None and self._outcome.sync_id == sync_id:
            return self._outcome
        self._progress_of(sync_id)
        return None

    def start_verifying(self, sync_id: str, now: float) -> None:
        """The trainer has sent everything: from now on a replica that fails is put out, and the sync goes on."""
        progress = self._progress_of(sync_id)
        progress.is_verifying = True
        progress.sync = replace(progress.sync, deadline=now + self._rules.sync_seconds)

    def verify(self, sync_id: str, digests: Mapping[str, str]) -> tuple[Member, ...]:
        """The members that hold what was sent and still live; puts out those with another digest, or none."""
        sync = self._progress_of(sync_id).sync
        for member in self._still_here(sync.members):
            if digests.get(member.replica_id) != sync.weights.digest:
                self.remove(member.replica_id, "it does not hold the weights that were sent")
        return self._still_here(sync.members)

    def commit(self, sync_id: str, served_ids: Collection[str], now: float) -> Outcome:
        """Commit the version if any of the members serves it; puts out the members that do not."""
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
        """End the sync without a commit; its members stay. Raises NotFoundError when it is not on."""
        self._progress_of(sync_id)
        return self._end(cause, reason)

    # Validation and time.

    def end_hold(self, policy_version: int) -> bool:
        """Let syncs go on if it is this version that is held. True when it was."""
        if policy_version == NO_VERSION or policy_version != self._held_version:
            return False
        self._held_version = NO_VERSION
        return True

    def expire(self, now: float) -> tuple[str, ...]:
        """End what is past its deadline; says what that was."""
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
        """When `expire` will next have something to do, unless something changes before."""
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
            # The trainer's may be the later one, if Redis has lost what was stored last: no epoch serves two groups.
            self._group = _Group(max(self._group.epoch, open_epoch) + 1, members)

    def _still_here(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        return tuple(member for member in members if _is_among(member, self.members))

    def _progress_of(self, sync_id: str) -> _Progress:
        if self._progress is None or self._progress.sync.sync_id != sync_id:
            raise NotFoundError(f"sync {sync_id!r} is not on; begin another")
        return self._progress

    def _end(self, cause: Cause | None, reason: str) -> Outcome:
        assert self._progress is not None
        self._outcome = Outcome(self._progress.sync.sync_id, cause, reason, tuple(self._progress.evicted))
        self._progress = None
        return self._outcome


def _is_other_process(known: Replica, replica: Replica) -> bool:
    """A process that was restarted under its old name has lost its weights, or its address."""
    has_lost_weights = known.holds.policy_version != NO_VERSION and replica.holds.policy_version == NO_VERSION
    return has_lost_weights or replace(known, holds=replica.holds) != replica


def _is_among(member: Member, members: Collection[Member]) -> bool:
    return any((other.replica_id, other.serial) == (member.replica_id, member.serial) for other in members)
