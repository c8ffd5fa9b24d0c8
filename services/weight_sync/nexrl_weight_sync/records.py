"""What weight sync knows: replicas, weights, and the sync that is running or has ended."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from nexrl_weight_sync.route import Route

NO_VERSION = -1


@dataclass(frozen=True)
class Rules:
    """Limits that the experiment sets.

    `max_lag_steps`: how many versions the committed one may lag behind the newest offered one before rollouts must
    wait; None: after the first commit rollouts never wait. `is_due` returns whether a version must be validated. Times
    are in seconds. `transport`: spec.weightSync.transport.
    """

    max_lag_steps: int | None
    lease_seconds: float
    sync_seconds: float
    hold_seconds: float
    is_due: Callable[[int], bool]
    transport: str = "auto"


@dataclass(frozen=True)
class Weights:
    """A policy version and the digest of its bytes; -1 and empty for none."""

    policy_version: int = NO_VERSION
    digest: str = ""


@dataclass(frozen=True)
class Replica:
    """A replica as it registered. `holds`: the weights that it serves.

    `token_address`: where clients with a token are served, instead of a certificate. `gpu`: UUID of the GPU into whose
    memory it can receive by NCCL; empty for host memory only.
    """

    replica_id: str
    address: str
    http_url: str
    holds: Weights
    token_address: str = ""
    gpu: str = ""


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
    """A running sync. `members[i]` has rank i + 1; the trainer has rank 0."""

    sync_id: str
    request_id: str
    weights: Weights
    epoch: int
    members: tuple[Member, ...]
    deadline: float
    route: Route


class Cause(StrEnum):
    """Why a sync ended without a commit."""

    REPLICA_LEFT = "replica_left"
    BROADCAST_FAILED = "broadcast_failed"
    NOT_TAKEN = "not_taken"
    SUPERSEDED = "superseded"
    TOO_LATE = "too_late"


@dataclass(frozen=True)
class Outcome:
    """How a sync ended. `cause` is None if it was committed; `reason` is the text for people."""

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
    """The state that is stored. `held_version`: the version held for validation, or -1.

    The weights that replicas hold are not stored: they may change while this process is down, so replicas report them.
    """

    committed: Weights = Weights()
    epoch: int = 0
    held_version: int = NO_VERSION
    replicas: tuple[Replica, ...] = ()
