"""A small model of the ledger, and the base of the state machines that compare the ledger with the model."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from nexrl.store import connect_redis, key_prefix
from nexrl_trajectory_pool.ledger import Grant, GrantedBatch, Ledger, LedgerRules

ResultT = TypeVar("ResultT")
BATCH_SIZE = 4
LEASE_SECONDS = 60.0
COLOURS = ("blue", "red")
GROUPINGS = {
    "by task": {"group_size": 2, "scoped": True},
    "by task and colour": {"group_size": 2, "scoped": True},
    "by colour, across tasks": {"group_size": 2, "scoped": False},
    "none": {"group_size": 1, "scoped": False},
}
REFILLS_ALL = 1000
"""As `max_refilled`: more than the groups of any history."""
READINESS = {
    "batch_size": {"needs_size": True, "needs_idle": False},
    "loaded_batch_finished": {"needs_size": False, "needs_idle": True},
    "both": {"needs_size": True, "needs_idle": True},
}

pick = st.integers(0, 10_000)
flags = st.booleans()
seldom = st.integers(0, 5).map(lambda n: n == 5)
"""True in about 1 of 6 cases. For events that set a history back: frequent ones would keep it from making progress."""


@dataclass
class Sample:
    """A sample in the model."""

    attempt: int
    deadline: float
    failures: int = 0
    state: str = "leased"
    reward: str = ""


@dataclass
class Batch:
    """A batch in the model. The samples of a batch never change."""

    samples: tuple[bytes, ...]
    sample_ids: tuple[str, ...]
    attempt: int
    deadline: float
    worker: str
    state: str = "leased"
    failures: int = 0
    """The number of failed trainings of this batch."""
    is_dropped: bool = False

    @property
    def trained_ids(self) -> tuple[str, ...]:
        """The samples that the batch's step trains."""
        return () if self.is_dropped else self.sample_ids

    def is_leased_to(self, worker: str) -> bool:
        """Return whether the batch is leased to `worker`."""
        return (self.state, self.worker) == ("leased", worker)


@dataclass
class Model:
    """The model: the state that a correct ledger would have."""

    samples: dict[str, Sample] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    version: int = 0
    trained_steps: int = 0
    durable_steps: int = 0
    incarnation: int = 1

    def outcome(self, sample_id: str, attempt: int) -> str:
        """Return the expected outcome of a put of this attempt; 'new' if the ledger should accept it."""
        sample = self.samples.get(sample_id)
        if sample is None or sample.attempt != attempt or sample.state in ("open", "dropped"):
            return "FENCED"
        return "DUPLICATE" if sample.state == "produced" else "new"

    def expire(self, now: float, max_attempts: int) -> None:
        """Take back all expired leases."""
        for sample in self.samples.values():
            if sample.state == "leased" and sample.deadline <= now:
                self.fail(sample, max_attempts)
        for batch in self.batches.values():
            if batch.state == "leased" and batch.deadline <= now:
                batch.state = "formed"

    def fail(self, sample: Sample, max_attempts: int) -> str:
        """Record a failed attempt, and return the expected outcome of its put."""
        sample.failures += 1
        sample.state = "open" if sample.failures < max_attempts else "dropped"
        return "RETRIED" if sample.state == "open" else "ACCEPTED"


@dataclass(frozen=True)
class InHand:
    """A train batch that the trainer holds: its samples, and a name if it is a dropped batch, which trains nothing."""

    sample_ids: tuple[str, ...]
    dropped_as: str = ""

    @property
    def payload(self) -> bytes:
        """The payload that the ledger stores for this train batch."""
        return f"{self.dropped_as}!{'|'.join(self.sample_ids)}".encode()

    @classmethod
    def read(cls, payload: bytes) -> "InHand":
        """Return the train batch that a payload encodes."""
        dropped_as, _, samples = payload.decode().partition("!")
        return cls(tuple(samples.split("|")), dropped_as)


class LedgerHistory(RuleBasedStateMachine):
    """A ledger, its model, and the memory of workers and trainer. A history begins by setting `limits` and `ledger`."""

    limits: LedgerRules
    ledger: Ledger
    grouping: str
    incarnation: int

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = self.runner.run(connect_redis(redis_url))
        self.prefix = key_prefix(f"property-{uuid.uuid4().hex[:12]}", "default")
        self.now = 1000.0
        self.requests: list[tuple[Callable[[], Awaitable[Any]], Any]] = []
        self.grants: list[Grant] = []
        self.leases: list[GrantedBatch] = []
        self.saved: list[tuple[dict[bytes, Any], Model]] = []
        self.lives = 0
        self.model = Model()
        # The trainer's memory, which survives a data loss in Redis: the samples of each step that its weights contain.
        self.weights: list[tuple[str, ...]] = []
        self.in_hand: InHand | None = None
        self.checkpoints: dict[int, list[tuple[str, ...]]] = {0: []}

    def request(self, act: Callable[[str], Awaitable[ResultT]], *, twice: bool) -> ResultT:
        """Call `act` with a request id. If `twice`, call it again with the same id, and require the same answer."""
        request_id = uuid.uuid4().hex
        answer = self.run(act(request_id))
        if not _is_empty(answer):
            self.requests.append((lambda: act(request_id), answer))
            if twice:
                assert self.run(act(request_id)) == answer
        return answer

    def run(self, work: Awaitable[ResultT]) -> ResultT:
        """Run `work` to its end, and return its result."""

        async def wait() -> ResultT:
            return await work

        return self.runner.run(wait())


def _is_empty(answer: object) -> bool:
    """Return whether an answer is empty. The ledger does not store empty answers, so a retry may get another."""
    if isinstance(answer, Grant):
        return not answer.tasks
    return isinstance(answer, tuple) and answer[0] is None
