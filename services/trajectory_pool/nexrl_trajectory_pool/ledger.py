"""The ledger: every sample is accounted for, once. The moves themselves are in ledger.lua; this gives them types.

open -> leased(attempt, deadline) -> produced(verdict) -> grouped -> batched -> trained(step) -> durable(checkpoint),
or dropped(reason). Each method is one atomic move; a repeated `request_id` gets the first answer.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any
from uuid import uuid4

from nexrl.errors import InvalidArgumentError, LeaseLostError, NotFoundError, error_class
from nexrl.store import Redis, run_script
from nexrl_trajectory_pool.audit import Audit, audit, live_rows, settled_rows

SCRIPT = resources.files(__package__).joinpath("ledger.lua").read_text()

SAMPLE_ID = re.compile(r"\d+(-\w+)?\.\d+")
"""<group>.<index>; the group is a number, and an ending when Redis was another process when it was granted."""

HISTORY_GROUPS = 256
"""Settled groups in a key, as in ledger.lua."""

MAX_BATCH_BYTES = 2**29
"""Trajectories of a batch. Its train batch, at most 3.5 times as large, is one message, which ends at 2 GiB."""

PIECE_BYTES = 2**26
"""Of a train batch: Redis takes half a GiB in a command, and is to answer others meanwhile."""

STAGED_SECONDS = 3600
"""After which the pieces of a train batch that was never put are forgotten."""

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
    max_payload_bytes: int = 2**53
    """Most bytes of samples, train batches and added tasks in Redis at a time."""
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
    """Groups of (name, payload of each sample in it); `sample_ids` are of all of them, in that order."""

    batch: int
    attempt: int
    groups: tuple[tuple[str, tuple[bytes, ...]], ...]
    sample_ids: tuple[str, ...]
    data_cursor: int


@dataclass(frozen=True)
class SampleRecord:
    """Where a sample is: open, leased, produced, batched, trained, durable or dropped."""

    sample_id: str
    state: str
    attempt: int = 0
    """Leases so far; 0 once its group has ended, when only where it went is kept."""
    batch: int | None = None
    drop_reason: str = ""


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
        self._constant = json.dumps(asdict(rules) | {"max_batch_bytes": MAX_BATCH_BYTES})[:-1]

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
        """Queue a task ahead of the data set. Raises ResourceExhaustedError when too much is held already."""
        await self._move("add_task", request_id, item, front=front)

    async def reset(self, request_id: str) -> None:
        """Start the data set again."""
        await self._move("reset", request_id)

    async def put_samples(self, request_id: str, results: Sequence[ProducedSample]) -> tuple[str, ...]:
        """Store results; gives ACCEPTED, DUPLICATE, FENCED or RETRIED for each.

        Raises ResourceExhaustedError, with nothing stored, when `max_payload_bytes` would be exceeded.
        """
        rows = [
            {"id": r.sample_id, "attempt": r.attempt, "oldest": r.oldest_version}
            | ({"failure": r.failure} if r.failure else {})
            | ({"leaf": r.leaf} if r.leaf else {})
            for r in results
        ]
        answer = await self._move("put_samples", request_id, *(r.payload for r in results), results=rows)
        return tuple(answer["outcomes"])

    async def lease_batch(
        self, request_id: str, lease_seconds: float, batch_size: int = 0, worker: str = ""
    ) -> tuple[GrantedBatch | None, bool]:
        """Lease the oldest unacknowledged batch, else form the next, of `batch_size` samples where it is not 0.

        A batch that is leased to `worker` already comes first: it would not ask if it had it. Also tells whether none
        can come any more. Raises LeaseLostError when the batch was trained meanwhile, as when a request is repeated
        very late.
        """
        size = {"size": batch_size} if batch_size else {}
        answer = await self._move("lease_batch", request_id, lease_seconds=lease_seconds, worker=worker, **size)
        if "batch" not in answer:
            return None, answer["exhausted"]
        if answer["bytes"] > MAX_BATCH_BYTES:  # a single group: others end a batch
            raise InvalidArgumentError(
                f"trajectoryPool.batchSize: batch {answer['batch']} has {answer['bytes']} bytes of trajectories; "
                f"at most {MAX_BATCH_BYTES}: choose a smaller one"
            )
        sample_ids = tuple(sample for g in answer["groups"] for sample in g["samples"])
        payloads = await self._payloads(sample_ids)
        if None in payloads.values():
            raise LeaseLostError(f"batch {answer['batch']}: the lease was lost")
        groups = tuple((g["name"], tuple(payloads[sample] for sample in g["samples"])) for g in answer["groups"])
        return GrantedBatch(answer["batch"], answer["attempt"], groups, sample_ids, answer["cursor"]), False

    async def return_batch(self, request_id: str, batch: int, attempt: int) -> None:
        """Give a leased batch back. Raises LeaseLostError when the lease is not held."""
        await self._move("return_batch", request_id, batch=batch, attempt=attempt)

    async def put_train_batch(
        self, request_id: str, batch: int, attempt: int, sample_ids: Sequence[str], payload: bytes, put_id: str = ""
    ) -> None:
        """Store a train batch, which `put_id` names, and acknowledge its batch, which holds `sample_ids`.

        Raises LeaseLostError when the lease is not held, or when the ledger's batch of that number holds other samples.
        """
        pieces = [payload[i : i + PIECE_BYTES] for i in range(0, len(payload), PIECE_BYTES)] or [b""]
        staged = f"tb:{batch}:{uuid4().hex}"
        for number, piece in enumerate(pieces[:-1]):
            await self._stage(staged, number, piece)
        await self._move(
            "put_train_batch",
            request_id,
            pieces[-1],
            batch=batch,
            attempt=attempt,
            ids=" ".join(sample_ids),
            put_id=put_id,
            staged=staged,
            pieces=len(pieces),
            bytes=len(payload),
        )

    async def lease_train_batch(self, step: int, incarnation: int) -> tuple[bytes | None, bool]:
        """The train batch of `step`; also tells whether none can come any more. Raises LeaseLostError."""
        answer = await self._move("lease_train_batch", step=step, incarnation=incarnation)
        pieces = [await self._piece(step, number) for number in range(answer["pieces"])]
        return b"".join(pieces) if pieces else None, answer["exhausted"]

    async def ack_train_batch(self, step: int, incarnation: int, sample_ids: Sequence[str], put_id: str = "") -> bool:
        """Count the samples of `step` as trained, once; tells whether a checkpoint is wanted, to make room.

        Raises LeaseLostError when fenced off, or when the ledger has another step next or another train batch for it:
        it has lost writes, and the trainer is to resume from a checkpoint.
        """
        ids = " ".join(sample_ids)
        answer = await self._move("ack_train_batch", step=step, incarnation=incarnation, ids=ids, put_id=put_id)
        return bool(answer.get("checkpoint_wanted"))

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
        for group in await self._group_ids(state["first_group"], state["next_group"] - 1):
            pipeline.hvals(f"{self._prefix}t:{group}")
        return [payload for values in await pipeline.execute() for payload in values]

    async def sample(self, sample_id: str) -> tuple[SampleRecord, bytes | None]:
        """What is known of a sample, and its payload while it is held. Raises NotFoundError."""
        if not SAMPLE_ID.fullmatch(sample_id):
            raise NotFoundError(f"sample_id: {sample_id!r}; a sample id, as '17.0', is needed")
        group, _, k = sample_id.partition(".")
        records = await self._records([group])
        found = next((record for record in records if record.sample_id == sample_id), None)
        if found is None:
            raise NotFoundError(f"sample_id: {sample_id!r}: no such sample was granted")
        payload: Any = await self._redis.hget(f"{self._prefix}t:{group}", k)
        return found, payload

    async def samples(self, first_group: int, most: int) -> tuple[list[SampleRecord], int | None]:
        """Records of all samples from group number `first_group` on, `most` or a group more; and where to go on."""
        records: list[SampleRecord] = []
        while len(records) < most:
            last = first_group + math.ceil((most - len(records)) / self.rules.samples_per_task) - 1
            groups = await self._group_ids(first_group, last)
            if not groups:
                return records, None
            records += await self._records(groups)
            first_group += len(groups)
        return records, first_group

    async def audit(self) -> Audit:
        """Count everything again from its records; says what contradicts what."""
        history = await self._history()
        settled = set(history)
        answer = await self._move("group_ids", first=0, last=2**53)
        live = [group for group in answer["groups"] or () if group not in settled]
        snapshot = await self._move("snapshot", groups=live, first=answer["next_group"])
        # What has settled between the two reads is in neither: its record is there now, and never changes.
        last = int(snapshot["meta"][snapshot["meta"].index("next_group") + 1]) - 1 if answer["next_group"] else -1
        live += await self._group_ids(answer["next_group"], last)
        missed = set(live) - {group[0] for group in snapshot["groups"] or ()}
        history |= await self._history(missed)
        return audit(snapshot, history)

    async def _records(self, groups: Sequence[str]) -> list[SampleRecord]:
        """In two reads, the living first: what has settled in between is found by the second."""
        pipeline = self._redis.pipeline(transaction=False)
        for group in groups:
            pipeline.hgetall(f"{self._prefix}g:{group}")
        rows = dict(zip(groups, await pipeline.execute(), strict=True))
        history = await self._history([group for group in groups if not rows[group]])
        state = await self.state()
        found = {group: live_rows(rows[group]) for group in groups if rows[group]}
        found |= {group: settled_rows(record) for group, record in history.items()}
        return [_record(f"{group}.{k}", row, state) for group in groups for k, row in enumerate(found.get(group, ()))]

    async def _group_ids(self, first: int, last: int) -> list[str]:
        return (await self._move("group_ids", first=first, last=last))["groups"] or []

    async def _history(self, groups: Collection[str] | None = None) -> dict[str, str]:
        """Where the samples of settled groups went, by group; of all when `groups` is None."""
        if groups is None:
            next_group = (await self.state())["next_group"]
            keys = list(range(next_group // HISTORY_GROUPS + 1))
        else:
            keys = sorted({int(group.partition("-")[0]) // HISTORY_GROUPS for group in groups})
        pipeline = self._redis.pipeline(transaction=False)
        for number in keys:
            pipeline.hgetall(f"{self._prefix}done:{number}")
        found = {k.decode(): v.decode() for packed in await pipeline.execute() for k, v in packed.items()}
        return found if groups is None else {group: found[group] for group in groups if group in found}

    async def _stage(self, name: str, number: int, piece: bytes) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(self._prefix + name, str(number), piece)
        pipeline.expire(self._prefix + name, STAGED_SECONDS)
        await pipeline.execute()

    async def _piece(self, step: int, number: int) -> bytes:
        piece: Any = await self._redis.hget(f"{self._prefix}tb:{step}", str(number))
        if piece is None:
            raise LeaseLostError(f"step {step}: its train batch is gone; a committed checkpoint contains it")
        return bytes(piece)

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
        encoded = f"{self._constant}, {json.dumps(arguments)[1:]}" if arguments else self._constant + "}"
        # The second key exists, the first never does: of a slot that is on its way to another node of a Redis Cluster,
        # a script that names both is refused at either end, and sent again. With the first alone it would find an
        # empty ledger at the other end, and begin another.
        keys = [self._prefix, self._prefix + "meta"]
        raw = await run_script(self._script, keys, [name, now, request_id, encoded, *payloads])
        answer: dict[str, Any] = json.loads(raw)
        if "error" in answer:
            raise error_class(answer["status"])(answer["error"], retry_after_seconds=answer.get("retry_after"))
        return answer


def _record(sample_id: str, row: str, state: LedgerState) -> SampleRecord:
    """The record of a row "state:attempt:failures", or of a state alone."""
    name, _, rest = row.partition(":")
    attempt = int(rest.partition(":")[0] or 0)
    if name.startswith("-"):
        return SampleRecord(sample_id, "dropped", attempt, drop_reason=name[1:])
    if not name[1:].isdecimal():
        return SampleRecord(sample_id, name, attempt)
    batch = int(name[1:])
    reached = (
        "durable" if batch < state["durable_steps"] else "trained" if batch < state["trained_steps"] else "batched"
    )
    return SampleRecord(sample_id, reached, attempt, batch)
