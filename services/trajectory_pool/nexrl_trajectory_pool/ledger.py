"""The ledger: every sample is accounted for, once. The moves themselves are in ledger.lua; this gives them types.

open -> leased(attempt, deadline) -> produced(verdict) -> grouped -> batched -> trained(step) -> durable(checkpoint),
or dropped(reason). Each method is one atomic move; a repeated `request_id` gets the first answer.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from nexrl.errors import LeaseLostError, error_class
from nexrl.store import Redis

SCRIPT = resources.files(__package__).joinpath("ledger.lua").read_text()

UNLIMITED = -1
"""As a number of positions: the data has no end."""


@dataclass(frozen=True)
class LedgerRules:
    """What the experiment asks of its ledger. Sizes in samples."""

    batch_size: int
    leaf_size: int
    """Samples in a complete group."""
    samples_per_task: int
    positions: int
    """Tasks in all epochs together, or UNLIMITED."""
    staleness: int
    """Most steps between the oldest token of a sample and the policy that trains on it."""
    scoped: bool
    """True when a group never spans two tasks, so that the end of a task's samples ends its groups."""
    release_incomplete: bool
    max_attempts: int
    max_queued: int
    """Most batches leased or waiting as train batches."""
    needs_size: bool = True
    """A batch is ready when it has batch_size samples."""
    needs_idle: bool = False
    """A batch is ready when everything granted has ended."""
    total_steps: int = 2**31
    """Steps of the experiment: no sample is granted that none of them would train."""
    unlimited: bool = False
    """No credit limit: validation, whose samples are never trained."""


@dataclass(frozen=True)
class GrantedTask:
    """Samples of one task. `position` counts the data set's items over all epochs; -1 when `item` was added by hand."""

    group: str
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
    """One result on its way in: `failure` is a lower-case verdict, or None when `payload` holds trajectories."""

    sample_id: str
    attempt: int
    failure: str | None = None
    leaf: str | None = None
    oldest_version: int = 0
    payload: bytes = b""


@dataclass(frozen=True)
class GrantedBatch:
    """Groups of (name, payload of each sample in it)."""

    batch: int
    attempt: int
    groups: tuple[tuple[str, tuple[bytes, ...]], ...]
    data_cursor: int


@dataclass(frozen=True)
class LedgerState:
    """Counters, in samples unless named otherwise."""

    counters: Mapping[str, int]
    dropped: Mapping[str, int]
    credit: int
    can_lease: bool
    """True when lease_tasks would grant something now."""
    exhausted: bool
    """True when nothing is left to grant and nothing granted can come back."""
    added_tasks: int
    """Tasks added by hand that were not granted yet."""
    unprocessed_batches: int
    """Batches formed or leased that are no train batches yet."""
    queued_train_batches: int

    def __getitem__(self, name: str) -> int:
        return self.counters.get(name, 0)

    @property
    def round(self) -> int | None:
        """The version of the running validation round; None when there is none."""
        return self.counters.get("round")

    @property
    def in_flight(self) -> int:
        """Granted, and neither trained nor dropped yet."""
        return sum(self[state] for state in ("open", "leased", "grouping", "ready", "batched"))

    @property
    def imbalance(self) -> int:
        """granted - trained - dropped - in flight; anything but 0 is a bug."""
        return self["granted"] - self["trained"] - sum(self.dropped.values()) - self.in_flight


class Ledger:
    """The ledger of one model tag and purpose. `prefix` names its keys; `clock` replaces Redis's own in tests."""

    def __init__(self, redis: Redis, prefix: str, rules: LedgerRules, clock: Callable[[], float] | None = None) -> None:
        self.rules = rules
        self._redis = redis
        self._prefix = prefix
        self._clock = clock
        self._script = redis.register_script(SCRIPT)
        self._constant = asdict(rules)

    @property
    def wake_channel(self) -> str:
        """Redis channel on which every move that may end a wait is told: tasks, batch, train, ended."""
        return self._prefix + "wake"

    async def lease_tasks(self, request_id: str, max_samples: int, lease_seconds: float) -> Grant:
        """Grant up to `max_samples`: first those that came back, then new tasks within the credit."""
        answer = await self._move("lease_tasks", request_id, max_samples=max_samples, lease_seconds=lease_seconds)
        tasks = tuple(
            GrantedTask(t["group"], t["pos"], t["item"].encode(), tuple((s[0], s[1]) for s in t["samples"]))
            for t in answer.get("leases", ())
        )
        return Grant(tasks, answer.get("deadline", 0.0), answer.get("waiting_on", ""), answer.get("exhausted", False))

    async def renew(self, samples: Sequence[tuple[str, int]], lease_seconds: float) -> tuple[str, ...]:
        """Move the deadlines of leases that are still held; gives the ids of those that are not."""
        answer = await self._move("renew", samples=samples, lease_seconds=lease_seconds)
        return tuple(answer["lost"])

    async def return_samples(self, request_id: str, samples: Sequence[tuple[str, int]]) -> int:
        """Take samples back unattempted; gives how many leases were still held."""
        return int((await self._move("return_samples", request_id, samples=samples))["returned"])

    async def add_task(self, request_id: str, item: bytes, *, front: bool) -> None:
        """Queue a task ahead of the data set."""
        await self._move("add_task", request_id, item, front=front)

    async def reset(self, request_id: str) -> None:
        """Start the data set again."""
        await self._move("reset", request_id)

    async def put_samples(self, request_id: str, results: Sequence[ProducedSample]) -> tuple[str, ...]:
        """Store results; gives ACCEPTED, DUPLICATE, FENCED or RETRIED for each."""
        rows = [
            {"id": r.sample_id, "attempt": r.attempt, "oldest": r.oldest_version}
            | ({"failure": r.failure} if r.failure else {})
            | ({"leaf": r.leaf} if r.leaf else {})
            for r in results
        ]
        answer = await self._move("put_samples", request_id, *(r.payload for r in results), results=rows)
        return tuple(answer["outcomes"])

    async def lease_batch(
        self, request_id: str, lease_seconds: float, batch_size: int = 0
    ) -> tuple[GrantedBatch | None, bool]:
        """Lease the oldest unacknowledged batch, else form the next, of `batch_size` samples where it is not 0.

        Also tells whether none can come any more. Raises LeaseLostError when the batch was trained meanwhile, as when a
        request is repeated very late.
        """
        size = {"size": batch_size} if batch_size else {}
        answer = await self._move("lease_batch", request_id, lease_seconds=lease_seconds, **size)
        if "batch" not in answer:
            return None, answer["exhausted"]
        payloads = await self._payloads([sample for g in answer["groups"] for sample in g["samples"]])
        if None in payloads.values():
            raise LeaseLostError(f"batch {answer['batch']}: the lease was lost")
        groups = tuple((g["name"], tuple(payloads[sample] for sample in g["samples"])) for g in answer["groups"])
        return GrantedBatch(answer["batch"], answer["attempt"], groups, answer["cursor"]), False

    async def return_batch(self, request_id: str, batch: int, attempt: int) -> None:
        """Give a leased batch back. Raises LeaseLostError when the lease is not held."""
        await self._move("return_batch", request_id, batch=batch, attempt=attempt)

    async def put_train_batch(self, request_id: str, batch: int, attempt: int, payload: bytes) -> None:
        """Store a train batch and acknowledge its batch. Raises LeaseLostError when the lease is not held."""
        await self._move("put_train_batch", request_id, payload, batch=batch, attempt=attempt)

    async def lease_train_batch(self, step: int, incarnation: int) -> tuple[bytes | None, bool]:
        """The train batch of `step`; also tells whether none can come any more. Raises LeaseLostError."""
        answer = await self._move("lease_train_batch", step=step, incarnation=incarnation)
        found: Any = await self._redis.get(f"{self._prefix}tb:{step}") if answer["found"] else None
        return found, answer["exhausted"]

    async def ack_train_batch(self, step: int, incarnation: int) -> None:
        """Count the samples of `step` as trained, once. Raises LeaseLostError when fenced off."""
        await self._move("ack_train_batch", step=step, incarnation=incarnation)

    async def commit_checkpoint(self, steps: int, incarnation: int) -> None:
        """Delete the train batches of the first `steps` steps. Raises LeaseLostError when fenced off."""
        await self._move("commit_checkpoint", steps=steps, incarnation=incarnation)

    async def resume(self, request_id: str, steps: int, data_cursor: int) -> tuple[int, int]:
        """A trainer begins after `steps` steps; gives its incarnation and how many steps it replays.

        Raises FailedPreconditionError when the train batches from there on are gone.
        """
        answer = await self._move("resume", request_id, steps=steps, cursor=data_cursor)
        return answer["incarnation"], answer["replayed"]

    async def set_version(self, version: int) -> int:
        """The committed policy version moves the credit; never backwards. Gives the version held."""
        return int((await self._move("set_version", version=version))["version"])

    async def hold(self, version: int, hold_seconds: float) -> None:
        """Grant no training tasks while `version` is validated, for at most `hold_seconds`."""
        await self._move("hold", version=version, hold_seconds=hold_seconds)

    async def unhold(self, version: int) -> None:
        """Grant training tasks again."""
        await self._move("unhold", version=version)

    async def begin_round(self, version: int) -> None:
        """Grant the tasks of one validation round. Raises FailedPreconditionError while another one runs."""
        await self._move("begin_round", version=version)

    async def end_round(self, version: int) -> None:
        """Grant nothing more, and delete the round's samples; a result that comes later is fenced off."""
        await self._move("end_round", version=version)

    async def expire(self) -> float | None:
        """Take back leases that ran out; gives the seconds until the next one does."""
        due_in = (await self._move("expire"))["due_in"]
        return None if due_in < 0 else float(due_in)

    async def state(self) -> LedgerState:
        """All counters."""
        answer = await self._move("state")
        flat = answer["meta"] or []
        counters = {k: int(v) for k, v in zip(flat[::2], flat[1::2], strict=True)}
        dropped = {k.removeprefix("dropped:"): v for k, v in counters.items() if k.startswith("dropped:")}
        return LedgerState(
            counters=counters,
            dropped=dropped,
            credit=int(answer["credit"]),
            can_lease=answer["can_lease"],
            exhausted=answer["exhausted"],
            added_tasks=answer["added"],
            unprocessed_batches=answer["unprocessed"],
            queued_train_batches=answer["queued"],
        )

    async def produced(self) -> list[bytes]:
        """Payloads of all produced samples (of a validation round, which forms no batches)."""
        state = await self.state()
        pipeline = self._redis.pipeline(transaction=False)
        for group in range(state["first_group"], state["next_group"]):
            pipeline.hvals(f"{self._prefix}t:{group}")
        return [payload for values in await pipeline.execute() for payload in values]

    async def _payloads(self, sample_ids: Sequence[str]) -> dict[str, bytes]:
        by_group: defaultdict[str, list[str]] = defaultdict(list)
        for sample_id in sample_ids:
            group, _, k = sample_id.partition(".")
            by_group[group].append(k)
        pipeline = self._redis.pipeline(transaction=False)
        for group, ks in by_group.items():
            pipeline.hmget(f"{self._prefix}t:{group}", ks)
        found = zip(by_group.items(), await pipeline.execute(), strict=True)
        return {f"{group}.{k}": payload for (group, ks), values in found for k, payload in zip(ks, values, strict=True)}

    async def _move(self, name: str, request_id: str = "", *payloads: bytes, **arguments: Any) -> dict[str, Any]:
        now = "" if self._clock is None else repr(self._clock())
        encoded = json.dumps(self._constant | arguments)
        raw = await self._script(keys=[self._prefix], args=[name, now, request_id, encoded, *payloads])
        answer: dict[str, Any] = json.loads(raw)
        if "error" in answer:
            raise error_class(answer["status"])(answer["error"])
        return answer
