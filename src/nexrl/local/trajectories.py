"""`nexrl traj list` and `nexrl traj get`: what became of samples, and what was said in them.

Where a sample is, the ledger knows; its trajectories are in the pool until its batch is processed, and from then on in
the batch that the run keeps (trajectories/batch_*.pb).
"""

import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from nexrl.errors import InvalidArgumentError, NexrlError, NotFoundError
from nexrl.local.ledger_view import pool_of
from nexrl.local.run_folder import experiment_of
from nexrl.rpc.client import call
from nexrl.tokenizers import build_tokenizer
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.trajectory_pb2 import CompletionSpan, SampleResult, Trajectory, Verdict
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub

if TYPE_CHECKING:
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceAsyncStub

CALL_SECONDS = 20.0
LISTED = 50
"""Samples listed unless another number, or a batch, is asked for."""
HELD_BY_POOL = (pool_pb.SAMPLE_STATE_PRODUCED, pool_pb.SAMPLE_STATE_BATCHED)
STATES = [name.removeprefix("SAMPLE_STATE_").lower() for name in pool_pb.SampleState.keys()[1:]]
TRAINED = (pool_pb.SAMPLE_STATE_TRAINED, pool_pb.SAMPLE_STATE_DURABLE)


@dataclass(frozen=True)
class Filter:
    """Which samples to list."""

    batch: int | None = None
    state: str | None = None
    """As in nexrl.v1.SampleState, in lower case."""
    limit: int | None = None
    """The newest so many; LISTED unless a batch is named."""

    def __post_init__(self) -> None:
        if self.state not in (None, *STATES):
            raise InvalidArgumentError(f"state: {self.state!r}; allowed: {', '.join(STATES)}")

    def passes(self, record: pool_pb.SampleRecord) -> bool:
        """True for a sample that is asked for."""
        is_in_batch = self.batch is None or (record.HasField("batch_id") and record.batch_id == self.batch)
        return is_in_batch and self.state in (None, _state(record))


@dataclass(frozen=True)
class Sample:
    """What is known of one sample; `result` and `group` are there while its trajectories are."""

    record: pool_pb.SampleRecord
    result: SampleResult | None = None
    group: str = ""

    @property
    def state(self) -> str:
        """Where it is; "-" where no ledger tells."""
        return _state(self.record) if self.record.state else "-"

    @property
    def batch(self) -> int | None:
        """The batch that holds it."""
        return self.record.batch_id if self.record.HasField("batch_id") else None

    @property
    def step(self) -> int | None:
        """The step that was made with it, as in metrics.jsonl: that of its batch, counted from 1."""
        return self.record.batch_id + 1 if self.record.state in TRAINED else None

    @property
    def attempt(self) -> int:
        """Attempts so far; 0 where nobody has counted."""
        return self.record.attempt or (self.result.attempt if self.result else 0)

    @property
    def verdict(self) -> str:
        """How it ended; empty where that is not at hand."""
        return Verdict.Name(self.result.verdict).removeprefix("VERDICT_") if self.result else ""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """None once they are gone, and before they are there."""
        return self.result.trajectories if self.result else ()


class Samples:
    """The samples of one run."""

    def __init__(self, run: Path, model_tag: str, pool: "TrajectoryPoolServiceAsyncStub | None") -> None:
        self._folder = run / "trajectories"
        self._model_tag = model_tag
        self._pool = pool
        self._batches: dict[int, Mapping[str, tuple[str, SampleResult]]] = {}

    async def get(self, sample_id: str) -> Sample:
        """One sample. Raises NotFoundError."""
        if self._pool is not None:
            return await self._from_pool(sample_id)
        for record in self._records_of_batches():
            if record.sample_id == sample_id:
                return self._with_batch(record)
        raise NotFoundError(f"sample_id: {sample_id!r} is in no batch of {self._folder}")

    async def complete(self, record: pool_pb.SampleRecord) -> Sample:
        """The sample of a record, with its trajectories where they are at hand."""
        sample = self._with_batch(record)
        if sample.result is None and record.state in HELD_BY_POOL and self._pool is not None:
            return await self._from_pool(record.sample_id)
        return sample

    async def records(self) -> AsyncIterator[pool_pb.SampleRecord]:
        """All samples, in the order in which they were granted; without a ledger only those in batches."""
        if self._pool is None:
            for record in self._records_of_batches():
                yield record
            return
        request = pool_pb.ListSamplesRequest(model_tag=self._model_tag)
        while True:
            page = await call(self._pool.ListSamples, request, timeout_seconds=CALL_SECONDS)
            for record in page.records:
                yield record
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    async def _from_pool(self, sample_id: str) -> Sample:
        assert self._pool is not None
        request = pool_pb.GetSampleRequest(model_tag=self._model_tag, sample_id=sample_id)
        answer = await call(self._pool.GetSample, request, timeout_seconds=CALL_SECONDS)
        if answer.HasField("result"):
            return Sample(answer.record, answer.result)
        return self._with_batch(answer.record)

    def _with_batch(self, record: pool_pb.SampleRecord) -> Sample:
        if not record.HasField("batch_id"):
            return Sample(record)
        group, result = self._batch(record.batch_id).get(record.sample_id, ("", None))
        return Sample(record, result, group)

    def _batch(self, number: int) -> Mapping[str, tuple[str, SampleResult]]:
        """Group and result of each sample of a batch; nothing where it is not kept (yet)."""
        if number not in self._batches:
            path = self._folder / f"batch_{number:06d}.pb"
            lease = pool_pb.BatchLease.FromString(path.read_bytes()) if path.is_file() else pool_pb.BatchLease()
            self._batches[number] = {s.sample_id: (group.group_id, s) for group in lease.groups for s in group.samples}
        return self._batches[number]

    def _records_of_batches(self) -> Iterator[pool_pb.SampleRecord]:
        for path in sorted(self._folder.glob("batch_*.pb")):
            number = int(path.stem.removeprefix("batch_"))
            for sample_id, (_, result) in self._batch(number).items():
                yield pool_pb.SampleRecord(sample_id=sample_id, attempt=result.attempt, batch_id=number)


@asynccontextmanager
async def samples_of(run: Path) -> AsyncIterator[Samples]:
    """The samples of the run in folder `run`, while the block runs. Raises NotFoundError for a folder that is none."""
    experiment = experiment_of(run)
    async with AsyncExitStack() as stack:
        try:
            pool = TrajectoryPoolServiceStub(await stack.enter_async_context(pool_of(run)))
        except NexrlError as error:
            sys.stderr.write(f"without the ledger, so that only samples in batches are known: {error}\n")
            pool = None
        yield Samples(run, experiment.spec.model.tag, pool)


async def print_list(run: Path, wanted: Filter, *, as_json: bool) -> None:
    """`nexrl traj list`. Raises NotFoundError for a batch without such samples."""
    limit = LISTED if wanted.limit is None and wanted.batch is None else wanted.limit
    async with samples_of(run) as samples:
        newest: deque[pool_pb.SampleRecord] = deque(maxlen=limit)
        async for record in samples.records():
            if wanted.passes(record):
                newest.append(record)
        found = [await samples.complete(record) for record in newest]
    if not found and wanted.batch is not None:
        raise NotFoundError(f"{run}: no such sample in batch {wanted.batch}")
    for line in json_lines(found) if as_json else table(found):
        sys.stdout.write(line + "\n")


async def print_sample(run: Path, sample_id: str, *, as_json: bool) -> None:
    """`nexrl traj get`: everything about one sample."""
    async with samples_of(run) as samples:
        sample = await samples.get(sample_id)
    lines = [json.dumps(sample_json(sample))] if as_json else describe(sample, token_decoder(run))
    for line in lines:
        sys.stdout.write(line + "\n")


def table(samples: Sequence[Sample]) -> Iterator[str]:
    """One line for each sample, under a headline."""
    head = ("sample", "state", "attempt", "verdict", "batch", "step", "reward", "tokens", "oldest version")
    return columns([head, *map(_row, samples)])


def json_lines(samples: Sequence[Sample]) -> Iterator[str]:
    """One JSON object for each trajectory; one for a sample that has none."""
    for sample in samples:
        fields = _sample_fields(sample)
        for trajectory in map(trajectory_json, sample.trajectories):
            yield json.dumps(fields | trajectory)
        if not sample.trajectories:
            yield json.dumps(fields)


def sample_json(sample: Sample) -> Mapping[str, Any]:
    """One JSON object for the sample, with all its trajectories."""
    return _sample_fields(sample) | {"trajectories": [trajectory_json(t) for t in sample.trajectories]}


def trajectory_json(trajectory: Trajectory) -> dict[str, Any]:
    """What a trajectory has, in plain types; log-probabilities in nats."""
    return {
        "prompt": trajectory.prompt,
        "response": trajectory.response,
        "reward": trajectory.reward,
        "reward_components": dict(trajectory.reward_components),
        "metadata": dict(trajectory.metadata),
        "finish_reason": trajectory.finish_reason,
        "policy_versions": [[span.start, span.end, span.policy_version] for span in trajectory.spans],
        # In protobuf's JSON, where a seed is a string: it has more digits than the numbers of most readers.
        "completions": [
            MessageToDict(c, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for c in trajectory.completions
        ],
        "token_ids": list(trajectory.token_ids),
        "loss_mask": [int(trained) for trained in trajectory.loss_mask],
        "logprobs": [round(logprob, 6) for logprob in trajectory.logprobs],
    }


def describe(sample: Sample, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """The sample for people; `decode` gives the text of tokens."""
    ending = sample.record.drop_reason or sample.verdict or "no verdict"
    yield f"sample {sample.record.sample_id}: {sample.state}, {ending}, attempt {sample.attempt or 'unknown'}"
    if sample.batch is not None:
        step = f"trained by step {sample.step}" if sample.step else "not known to be trained"
        yield f"batch {sample.batch}, {step}"
    if not sample.trajectories:
        yield "no trajectories: not there yet, or dropped before they came into a batch"
    for number, trajectory in enumerate(sample.trajectories, start=1):
        yield from ("", f"trajectory {number} of {len(sample.trajectories)}")
        yield from _trajectory_lines(trajectory, decode)


def draw_text(completion: CompletionSpan) -> str:
    """How a completion was drawn, in one line."""
    if not completion.HasField("draw"):
        return "not recorded"
    draw = completion.draw
    limits = [f"top-p {draw.top_p:g}"] * (0 < draw.top_p < 1) + [f"top-k {draw.top_k}"] * (draw.top_k > 0)
    return ", ".join(
        [f"seed {draw.seed}", f"temperature {draw.temperature:g}", *limits, f"at most {draw.max_new_tokens} tokens"]
    )


def token_decoder(run: Path) -> Callable[[Sequence[int]], str]:
    """The text of tokens of the run's model; their ids where the tokenizer is not at hand any more."""
    try:
        tokenizer = build_tokenizer(experiment_of(run).spec.model)
    except InvalidArgumentError:
        return lambda token_ids: " ".join(map(str, token_ids))
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))


def columns(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """The rows as lines, with cells of a column below each other."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _state(record: pool_pb.SampleRecord) -> str:
    return pool_pb.SampleState.Name(record.state).removeprefix("SAMPLE_STATE_").lower()


def _row(sample: Sample) -> Sequence[object]:
    trajectories = sample.trajectories
    versions = [span.policy_version for trajectory in trajectories for span in trajectory.spans]
    return (
        sample.record.sample_id,
        sample.state,
        sample.attempt or "-",
        sample.record.drop_reason or sample.verdict or "-",
        "-" if sample.batch is None else sample.batch,
        sample.step or "-",
        f"{trajectories[-1].reward:.3f}" if trajectories else "-",
        sum(sum(trajectory.loss_mask) for trajectory in trajectories) if trajectories else "-",
        min(versions) if versions else "-",
    )


def _sample_fields(sample: Sample) -> dict[str, Any]:
    return {
        "batch": sample.batch,
        "step": sample.step,
        "group": sample.group or None,
        "sample": sample.record.sample_id,
        "state": sample.state,
        "attempt": sample.attempt or None,
        "verdict": sample.verdict or None,
        "drop_reason": sample.record.drop_reason or None,
    }


def _trajectory_lines(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    components = ", ".join(f"{name} {value:g}" for name, value in sorted(trajectory.reward_components.items()))
    yield f"reward    {trajectory.reward:g}" + (f" ({components})" if components else "")
    yield f"prompt    {trajectory.prompt!r}"
    yield f"response  {trajectory.response!r}"
    yield f"ended by  {trajectory.finish_reason or '-'}"
    yield from (f"metadata  {name}: {value}" for name, value in sorted(trajectory.metadata.items()))
    yield from (f"drawn     {c.start} to {c.end - 1}: {draw_text(c)}" for c in trajectory.completions)
    rows: list[Sequence[object]] = [("position", "token", "logprob", "version", "text")]
    for span in trajectory.spans:
        for position in range(span.start, span.end):
            token, logprob = trajectory.token_ids[position], trajectory.logprobs[position]
            rows.append((position, token, f"{logprob:.4f}", span.policy_version, repr(decode([token]))))
    yield from columns(rows)
