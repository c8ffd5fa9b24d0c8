"""The audit: every sample is counted again from its records, and what contradicts what is named.

Pure: a snapshot of the ledger in, findings out. The rows of the samples are the truth; counters, queues, leases,
batches and history must say the same.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IN_FLIGHT = ("open", "leased", "grouping", "ready", "batched")


@dataclass(frozen=True)
class Finding:
    """Something that contradicts the row of a sample: `subject` is a sample, group, batch or counter."""

    subject: str
    problem: str


@dataclass(frozen=True)
class Audit:
    """Samples by state and dropped ones by reason, as the rows have it; balanced when there are no findings."""

    samples: Mapping[str, int]
    dropped: Mapping[str, int]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Sample:
    """`state` as in ledger.lua; `is_live` while its group has rows."""

    sample_id: str
    state: str
    is_live: bool
    is_stored: bool

    @property
    def batch(self) -> int | None:
        return int(self.state[1:]) if self.state[0] == "b" and self.state[1:].isdecimal() else None


def audit(snapshot: Mapping[str, Any], history: Mapping[str, str]) -> Audit:
    """Count the ledger again.

    `snapshot` is the answer of ledger.lua's move of that name; `history` has where the samples of settled groups went,
    by group.
    """
    meta = {name: int(value) for name, value in _pairs(snapshot["meta"]).items()}
    samples = list(_samples(snapshot, history))
    places = _places(snapshot)
    ready = set(_ready(snapshot))
    counted, dropped = _count(samples, ready, meta)
    findings = [
        *_missing_groups(snapshot, history, meta),
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
    """The rows "state:attempt:failures" of a group that has not settled, by index."""
    return [fields.get(b"s%d" % k, b"lost:0:0").decode() for k in range(int(fields[b"n"]))]


def settled_rows(record: str) -> list[str]:
    """Where the samples of a settled group went, by index: "2*b17" or "b17,-stale"."""
    number, times, state = record.partition("*")
    return [state] * int(number) if times else record.split(",")


def _samples(snapshot: Mapping[str, Any], history: Mapping[str, str]) -> Iterator[_Sample]:
    live = set()
    for group, flat, stored in snapshot["groups"] or ():
        fields = _pairs(flat)
        live.add(group)
        for k in range(int(fields["n"])):
            state = fields.get(f"s{k}", "lost:0:0").partition(":")[0]
            yield _Sample(f"{group}.{k}", state, True, str(k) in (stored or ()))
    for group, record in history.items():
        for k, state in enumerate(settled_rows(record) if group not in live else ()):
            yield _Sample(f"{group}.{k}", state, False, False)


def _places(snapshot: Mapping[str, Any]) -> dict[str, list[str]]:
    """Where each sample is listed: each queue, lease, group and batch that names it, as often as it does."""
    places: defaultdict[str, list[str]] = defaultdict(list)

    def note(place: str, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids or ():
            places[sample_id].append(place)

    note("open", snapshot["open"])
    note("leased", snapshot["lease"])
    for name, waiting in (snapshot["leaves"] or {}).items():
        note(f"group {name}", waiting)
    note("ready", _ready(snapshot))
    for batch, flat in (snapshot["batches"] or {}).items():
        note(f"batch {batch}", _pairs(flat).get("ids", "").split())
    return places


def _ready(snapshot: Mapping[str, Any]) -> Iterator[str]:
    for entry in snapshot["ready"] or ():
        for leaf in json.loads(entry)["groups"]:
            yield from leaf["samples"]


def _check_sample(sample: _Sample, places: Sequence[str], meta: Mapping[str, int]) -> Iterator[Finding]:
    """Each sample is listed where its row says, once."""
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
    """Batches are numbered without a gap, hold as many samples as when formed, and have what the next one needs."""
    sizes = {int(batch): int(size) for batch, size in _pairs(snapshot["sizes"]).items()}
    held = Counter(sample.batch for sample in samples if sample.batch is not None)
    expected = range(meta.get("start_steps", 0), meta.get("next_batch", 0))
    for batch in sorted({*held, *sizes, *expected}):
        if batch not in expected:
            yield Finding(f"batch {batch}", f"outside of the batches formed: {expected.start} to {expected.stop - 1}")
        elif held[batch] != sizes.get(batch):
            yield Finding(f"batch {batch}", f"formed of {sizes.get(batch)} samples; {held[batch]} rows name it")
    train = _pairs(snapshot["train"])
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
    in_meta = {name.removeprefix("dropped:"): value for name, value in meta.items() if name.startswith("dropped:")}
    for name in counted:
        if counted[name] != meta.get(name, 0):
            yield Finding(name, f"counted {meta.get(name, 0)} on the way; the rows have {counted[name]}")
    for reason in sorted({*dropped, *in_meta}):
        if dropped.get(reason, 0) != in_meta.get(reason, 0):
            yield Finding(
                f"dropped:{reason}", f"counted {in_meta.get(reason, 0)}; the rows have {dropped.get(reason, 0)}"
            )


def _missing_groups(
    snapshot: Mapping[str, Any], history: Mapping[str, str], meta: Mapping[str, int]
) -> Iterator[Finding]:
    numbers = Counter(int(group[0].partition("-")[0]) for group in snapshot["groups"] or ())
    live = {group[0] for group in snapshot["groups"] or ()}
    numbers.update(int(group.partition("-")[0]) for group in history if group not in live)
    for number in range(meta.get("first_group", 0), meta.get("next_group", 0)):
        if numbers[number] != 1:
            yield Finding(f"group {number}", "granted, and has no record" if not numbers[number] else "has two records")


def _count(
    samples: Iterable[_Sample], ready: set[str], meta: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    counted = dict.fromkeys(("granted", *IN_FLIGHT, "trained", "durable"), 0)
    dropped: Counter[str] = Counter()
    for sample in samples:
        counted["granted"] += 1
        if sample.state.startswith("-"):
            dropped[sample.state[1:]] += 1
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
