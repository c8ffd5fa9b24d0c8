"""What the moves of the ledger take and return."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nexrl.sample_states import IN_FLIGHT
from nexrl_trajectory_pool.ledger.names import COUNTERS

SAMPLE_ID = re.compile(r"\d+(-\w+)?\.\d+")
"""<task>.<index>. The task is a number, with an ending if Redis was restarted before it was granted."""

UNLIMITED = -1
"""As a number of positions: the data has no end."""


@dataclass(frozen=True)
class LedgerRules:
    """What the experiment asks of its ledger. Sizes in samples."""

    batch_size: int
    group_size: int
    """Samples in a complete group."""
    samples_per_task: int
    positions: int
    """Tasks in all epochs together, or UNLIMITED."""
    staleness: int
    """Most steps between the oldest token of a sample and the policy that trains on it."""
    scoped: bool
    """True if a group never spans two tasks, so that the end of a task's samples ends its groups."""
    release_incomplete: bool
    max_attempts: int
    max_queued: int
    """Most batches leased or waiting as train batches."""
    needs_size: bool = True
    """A batch is ready when it has batch_size samples."""
    needs_idle: bool = False
    """A batch is ready when everything granted has ended."""
    max_payload_bytes: int = 2**53
    """Maximum number of bytes of samples, train batches and added tasks in Redis at one time."""
    total_steps: int = 2**31
    """Steps of the experiment: no sample is granted that none of them would train."""
    is_bounded_by_staleness: bool = True
    """If True, the credit grants samples for `staleness` steps ahead. If False, it grants them for all remaining steps,
    and groups that become stale are dropped."""
    max_refilled: int = 0
    """Most groups of equal rewards that are dropped, and others granted instead, before one batch; 0: none ever is."""
    unlimited: bool = False
    """No credit limit: validation, whose samples are never trained."""


@dataclass(frozen=True)
class Drawn:
    """What a sampler has drawn for the tasks at position `first` and after it."""

    first: int
    names: Sequence[str | Literal[False]]
    """The id of the task in its data if it is granted when its turn comes, False if it is left out."""


@dataclass(frozen=True)
class GrantedTask:
    """Samples of one task. `position` counts the data set's items over all epochs; -1 if `item` was added by hand."""

    task: str
    """The id of this grant, before the dot in the ids of its samples."""
    position: int
    item: bytes
    samples: tuple[tuple[str, int], ...]
    """(sample id, attempt)"""


@dataclass(frozen=True)
class Grant:
    """Answer to lease_tasks; `deadline` in Unix seconds."""

    tasks: tuple[GrantedTask, ...]
    deadline: float
    waiting_on: str
    exhausted: bool


@dataclass(frozen=True)
class ProducedSample:
    """One result on its way in: `failure` is a lower-case verdict, or None if `payload` holds trajectories."""

    sample_id: str
    attempt: int
    failure: str | None = None
    group: str | None = None
    oldest_version: int = 0
    payload: bytes = b""
    newest_version: int = 0
    reward: str = ""
    """Equal texts are equal rewards."""
    error: str = ""
    """What failed, for people."""


@dataclass(frozen=True)
class FailedAttempt:
    """A failed attempt at a sample; `verdict` is in lower case."""

    sample: str
    worker: str
    verdict: str
    error: str


@dataclass(frozen=True)
class GrantedBatch:
    """Groups of (name, payload of each sample in it); `sample_ids` are of all of them, in that order."""

    batch: int
    attempt: int
    groups: tuple[tuple[str, tuple[bytes, ...]], ...]
    sample_ids: tuple[str, ...]
    data_cursor: int
    refilled_groups: int = 0
    """Groups of equal rewards that were dropped while the batch was being filled."""


@dataclass(frozen=True)
class SampleRecord:
    """Where a sample is: open, leased, produced, batched, trained, durable or dropped."""

    sample_id: str
    state: str
    attempt: int = 0
    """Leases so far; 0 once its task has settled, because then only its outcome is kept."""
    batch: int | None = None
    drop_reason: str = ""


@dataclass(frozen=True)
class LedgerState:
    """Counters, in samples unless named otherwise."""

    counters: Mapping[str, int]
    dropped: Mapping[str, int]
    credit: int
    can_lease: bool
    """True if lease_tasks would grant something now."""
    exhausted: bool
    """True if nothing is left to grant, and no granted sample can become open again."""
    added_tasks: int
    """Tasks added by hand that were not granted yet."""
    unprocessed_batches: int
    """Batches formed or leased that are no train batches yet."""
    queued_train_batches: int
    last_failure: FailedAttempt | None = None
    """The newest of the `failed_attempts`."""

    def __getitem__(self, name: str) -> int:
        """Return a counter, 0 if nothing was counted. Raises KeyError for a name that is no counter."""
        if name not in COUNTERS:
            raise KeyError(name)
        return self.counters.get(name, 0)

    @property
    def round(self) -> int | None:
        """The version of the running validation round; None if there is none."""
        return self.counters.get("round")

    @property
    def in_flight(self) -> int:
        """Granted, and neither trained nor dropped yet."""
        return sum(self[state] for state in IN_FLIGHT)

    @property
    def imbalance(self) -> int:
        """granted - trained - dropped - in flight; anything but 0 is a bug."""
        return self["granted"] - self["trained"] - sum(self.dropped.values()) - self.in_flight
