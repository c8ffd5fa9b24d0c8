"""The audit counts every sample again from its records and names each contradiction.

It is pure: it turns a snapshot of the ledger into findings. The rows of the samples are the truth. Counters, queues,
leases, batches and history must agree with them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexrl.sample_states import IN_FLIGHT
from nexrl_trajectory_pool.ledger.names import DROPPED


@dataclass(frozen=True)
class Finding:
    """A contradiction of the row of a sample: `subject` is a sample, task, batch or counter."""

    subject: str
    problem: str


@dataclass(frozen=True)
class Audit:
    """Samples by state, and dropped samples by reason, counted from the rows; balanced if there are no findings."""

    samples: Mapping[str, int]
    dropped: Mapping[str, int]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Sample:
    """`state` as in the Lua files; `is_live` while its task has rows."""

    sample_id: str
    state: str
    is_live: bool
    is_stored: bool

    @property
    def batch(self) -> int | None:
        return int(self.state[1:]) if self.state[0] == "b" and self.state[1:].isdecimal() else None


def audit(snapshot: Mapping[str, Any], history: Mapping[str, str]) -> Audit:
    """Count the ledger again.

    `snapshot` is the answer of the move of that name; `history` says where the samples of settled tasks went, by task.
    """
    meta = {name: int(value) for name, value in _pairs(snapshot["meta"]).items()}
    samples = list(_samples(snapshot, history))
    places = _places(snapshot)
    ready = set(_ready(snapshot))
    counted, dropped = _count(samples, ready, meta, snapshot)
    findings = [
        *_missing_tasks(snapshot, history, meta),
        *(finding for sample in samples for finding in _check_sample(sample, places.pop(sample.sample_id, ()), meta)),
        *(
            Finding(sample_id, f"is in {', '.join(where)}, and was never granted")
            for sample_id, where in places.items()
        ),
        *_check_batches(samples, snapshot, meta),
        *_check_counters(counted, dropped, meta),
    ]
    return Audit(counted, dropped, tuple(findings))


def live_rows(fields: Mapping[bytes, bytes]) -> list[str]:
    """Return the rows "state:attempt:failures" of a task that has not settled, by index."""
    return [fields.get(b"s%d" % k, b"lost:0:0").decode() for k in range(int(fields[b"n"]))]


def settled_rows(record: str) -> list[str]:
    """Return where the samples of a settled task went, by index: "2*b17" or "b17,-stale"."""
    number, times, state = record.partition("*")
    return [state] * int(number) if times else record.split(",")


def _samples(snapshot: Mapping[str, Any], history: Mapping[str, str]) -> Iterator[_Sample]:
    live = set()
    for task, flat, stored in snapshot["tasks"] or ():
        fields = _pairs(flat)
        live.add(task)
        for k in range(int(fields["n"])):
            state = fields.get(f"s{k}", "lost:0:0").partition(":")[0]
            yield _Sample(f"{task}.{k}", state, True, str(k) in (stored or ()))
    for task, record in history.items():
        for k, state in enumerate(settled_rows(record) if task not in live else ()):
            yield _Sample(f"{task}.{k}", state, False, False)


def _places(snapshot: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return where each sample is listed: each queue, lease, group and batch that names it, as often as it does."""
    places: defaultdict[str, list[str]] = defaultdict(list)

    def note(place: str, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids or ():
            places[sample_id].append(place)

    note("open", snapshot["open"])
    note("leased", snapshot["leases"])
    for name, waiting in (snapshot["groups"] or {}).items():
        note(f"group {name}", waiting)
    note("ready", _ready(snapshot))
    for batch, flat in (snapshot["batches"] or {}).items():
        note(f"batch {batch}", _pairs(flat).get("ids", "").split())
    return places


def _ready(snapshot: Mapping[str, Any]) -> Iterator[str]:
    for entry in snapshot["ready"] or ():
        for group in json.loads(entry)["groups"]:
            yield from group["samples"]


def _check_sample(sample: _Sample, places: Sequence[str], meta: Mapping[str, int]) -> Iterator[Finding]:
    """Check that each sample is listed where its row says, once."""
    state, found = sample.state, ", ".join(places) or "nowhere"
    if state in ("open", "leased"):
        is_right = list(places) == [state]
    elif state == "produced":
        is_right = len(places) == 1 and places[0].startswith(("group ", "ready"))
    elif sample.batch is not None:
        is_kept = sample.batch >= meta.get("durable_steps", 0)
        is_right = list(places) == ([f"batch {sample.batch}"] if is_kept else [])
    else:
        is_right = state.startswith("-") and not places
    if not is_right:
        yield Finding(sample.sample_id, f"its row says {state!r}; listed: {found}")
    if state == "produced" and not sample.is_stored:
        yield Finding(sample.sample_id, "its row says 'produced', and its trajectories are gone")


def _check_batches(
    samples: Iterable[_Sample], snapshot: Mapping[str, Any], meta: Mapping[str, int]
) -> Iterator[Finding]:
    """Check that batches are numbered without a gap, keep their size, and have what the next state needs."""
    sizes = {int(batch): int(size) for batch, size in _pairs(snapshot["batch_sizes"]).items()}
    held = Counter(sample.batch for sample in samples if sample.batch is not None)
    expected = range(meta.get("start_steps", 0), meta.get("next_batch", 0))
    for batch in sorted({*held, *sizes, *expected}):
        if batch not in expected:
            yield Finding(f"batch {batch}", f"outside of the batches formed: {expected.start} to {expected.stop - 1}")
        elif held[batch] != sizes.get(batch):
            yield Finding(f"batch {batch}", f"formed of {sizes.get(batch)} samples; {held[batch]} rows name it")
    train = _pairs(snapshot["train_batches"])
    batches = snapshot["batches"] or {}
    for batch, flat in batches.items():
        is_acked = _pairs(flat).get("state") == "acked"
        if is_acked and not (snapshot["stored"][batch] and batch in train):
            yield Finding(f"batch {batch}", "acknowledged, and its train batch is gone")
        if is_acked != (batch in train):
            yield Finding(f"batch {batch}", "is both a batch and a train batch, or neither")
        is_trained = int(batch) < meta.get("trained_steps", 0)
        if (train.get(batch) == "trained") != is_trained:
            yield Finding(
                f"batch {batch}", f"is {train.get(batch)}, and {meta.get('trained_steps', 0)} steps are trained"
            )


def _check_counters(
    counted: Mapping[str, int], dropped: Mapping[str, int], meta: Mapping[str, int]
) -> Iterator[Finding]:
    in_meta = {name.removeprefix(DROPPED): value for name, value in meta.items() if name.startswith(DROPPED)}
    for name in counted:
        if counted[name] != meta.get(name, 0):
            yield Finding(name, f"counted {meta.get(name, 0)} on the way; the rows have {counted[name]}")
    for reason in sorted({*dropped, *in_meta}):
        if dropped.get(reason, 0) != in_meta.get(reason, 0):
            yield Finding(
                f"{DROPPED}{reason}", f"counted {in_meta.get(reason, 0)}; the rows have {dropped.get(reason, 0)}"
            )


def _missing_tasks(
    snapshot: Mapping[str, Any], history: Mapping[str, str], meta: Mapping[str, int]
) -> Iterator[Finding]:
    numbers = Counter(int(task[0].partition("-")[0]) for task in snapshot["tasks"] or ())
    live = {task[0] for task in snapshot["tasks"] or ()}
    numbers.update(int(task.partition("-")[0]) for task in history if task not in live)
    for number in range(meta.get("first_task", 0), meta.get("next_task", 0)):
        if numbers[number] != 1:
            yield Finding(f"task {number}", "granted, and has no record" if not numbers[number] else "has two records")


def _count(
    samples: Iterable[_Sample], ready: set[str], meta: Mapping[str, int], snapshot: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    counted = dict.fromkeys(("granted", *IN_FLIGHT, "trained", "durable"), 0)
    dropped: Counter[str] = Counter()
    dropped_batches = {int(batch): reason for batch, reason in _pairs(snapshot["dropped_batches"]).items()}
    for sample in samples:
        counted["granted"] += 1
        if sample.state.startswith("-"):
            dropped[sample.state[1:]] += 1
        elif sample.batch in dropped_batches:
            dropped[dropped_batches[sample.batch]] += 1
            continue
        for state in _reached(sample, ready, meta):
            counted[state] += 1
    return counted, dict(dropped)


def _reached(sample: _Sample, ready: set[str], meta: Mapping[str, int]) -> tuple[str, ...]:
    if sample.state in ("open", "leased"):
        return (sample.state,)
    if sample.state == "produced":
        return ("ready",) if sample.sample_id in ready else ("grouping",)
    if sample.batch is None:
        return ()
    if sample.batch >= meta.get("trained_steps", 0):
        return ("batched",)
    return ("trained", "durable") if sample.batch < meta.get("durable_steps", 0) else ("trained",)


def _pairs(flat: Sequence[str] | None) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True)) if flat else {}
