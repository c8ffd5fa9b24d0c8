"""`nexrl traj list` and `nexrl traj get`: the state and the content of samples.

The ledger has the state of each sample. The trajectories of a sample are in the trajectory pool until its batch is
processed, and in the batch's file afterwards (nexrl.run_layout.batch_path).
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
from nexrl.run_layout import TRAJECTORIES_FOLDER, batch_path, batches_by_number
from nexrl.spec import ExperimentSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.trajectory_pb2 import (
    PURPOSE_TRAINING,
    PURPOSE_VALIDATION,
    CompletionSpan,
    SampleResult,
    Trajectory,
    Verdict,
)
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub

if TYPE_CHECKING:
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceAsyncStub

CALL_SECONDS = 20.0
LISTED = 50
"""Number of samples listed if neither a limit nor a batch is given."""
HELD_BY_POOL = (pool_pb.SAMPLE_STATE_PRODUCED, pool_pb.SAMPLE_STATE_BATCHED)
STATES = [name.removeprefix("SAMPLE_STATE_").lower() for name in pool_pb.SampleState.keys()[1:]]
TRAINED = (pool_pb.SAMPLE_STATE_TRAINED, pool_pb.SAMPLE_STATE_DURABLE)


@dataclass(frozen=True)
class Filter:
    """Selects the samples to list."""

    batch: int | None = None
    state: str | None = None
    """A name of nexrl.v1.SampleState in lower case."""
    limit: int | None = None
    """Only the newest this many; default: LISTED, or all samples of the batch."""

    def __post_init__(self) -> None:
        if self.state not in (None, *STATES):
            raise InvalidArgumentError(f"state: {self.state!r}; allowed: {', '.join(STATES)}")

    def passes(self, record: pool_pb.SampleRecord) -> bool:
        """Return whether the sample is selected."""
        is_in_batch = self.batch is None or (record.HasField("batch_id") and record.batch_id == self.batch)
        return is_in_batch and self.state in (None, _state(record))


@dataclass(frozen=True)
class Sample:
    """One sample. `result` and `group` are set only while its trajectories exist."""

    record: pool_pb.SampleRecord
    result: SampleResult | None = None
    group: str = ""

    @property
    def state(self) -> str:
        """State in the ledger; "-" without a ledger."""
        return _state(self.record) if self.record.state else "-"

    @property
    def batch(self) -> int | None:
        """Number of its batch, if it is in one."""
        return self.record.batch_id if self.record.HasField("batch_id") else None

    @property
    def step(self) -> int | None:
        """The step that trained on it, as numbered in metrics.jsonl: its batch number plus 1."""
        return self.record.batch_id + 1 if self.record.state in TRAINED else None

    @property
    def attempt(self) -> int:
        """Number of attempts so far; 0 if unknown."""
        return self.record.attempt or (self.result.attempt if self.result else 0)

    @property
    def verdict(self) -> str:
        """How the sample ended; empty if unknown."""
        return Verdict.Name(self.result.verdict).removeprefix("VERDICT_") if self.result else ""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """The trajectories; empty before they exist and after they were dropped."""
        return self.result.trajectories if self.result else ()


class Samples:
    """Reads the samples of one run."""

    def __init__(self, run: Path, spec: ExperimentSpec, pool: "TrajectoryPoolServiceAsyncStub | None") -> None:
        self._folder = run / TRAJECTORIES_FOLDER
        self._model_tag = spec.model.tag
        # Without steps no training sample is granted: the samples of `nexrl eval` are those of its validation.
        self._purpose = PURPOSE_TRAINING if spec.trainer.steps else PURPOSE_VALIDATION
        self._pool = pool
        self._batches: dict[int, Mapping[str, tuple[str, SampleResult]]] = {}

    async def get(self, sample_id: str) -> Sample:
        """Return one sample. Raises NotFoundError."""
        if self._pool is not None:
            return await self._from_pool(sample_id)
        for record in self._records_of_batches():
            if record.sample_id == sample_id:
                return self._with_batch(record)
        raise NotFoundError(f"sample_id: {sample_id!r} is in none of the batches in {self._folder}")

    async def complete(self, record: pool_pb.SampleRecord) -> Sample:
        """Return the sample of a record, with its trajectories if they still exist."""
        sample = self._with_batch(record)
        if sample.result is None and record.state in HELD_BY_POOL and self._pool is not None:
            return await self._from_pool(record.sample_id)
        return sample

    async def records(self) -> AsyncIterator[pool_pb.SampleRecord]:
        """Yield all samples in the order in which they were granted; without a ledger, only those in batches."""
        if self._pool is None:
            for record in self._records_of_batches():
                yield record
            return
        request = pool_pb.ListSamplesRequest(model_tag=self._model_tag, purpose=self._purpose)
        while True:
            page = await call(self._pool.ListSamples, request, timeout_seconds=CALL_SECONDS)
            for record in page.records:
                yield record
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    async def _from_pool(self, sample_id: str) -> Sample:
        assert self._pool is not None
        request = pool_pb.GetSampleRequest(model_tag=self._model_tag, sample_id=sample_id, purpose=self._purpose)
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
        """Return group and result of each sample of a batch; empty if the batch has no file (yet)."""
        if number not in self._batches:
            path = batch_path(self._folder, number)
            lease = pool_pb.BatchLease.FromString(path.read_bytes()) if path.is_file() else pool_pb.BatchLease()
            self._batches[number] = {s.sample_id: (group.group_id, s) for group in lease.groups for s in group.samples}
        return self._batches[number]

    def _records_of_batches(self) -> Iterator[pool_pb.SampleRecord]:
        for number in batches_by_number(self._folder):
            for sample_id, (_, result) in self._batch(number).items():
                yield pool_pb.SampleRecord(sample_id=sample_id, attempt=result.attempt, batch_id=number)


@asynccontextmanager
async def samples_of(run: Path) -> AsyncIterator[Samples]:
    """Open the samples of the run in folder `run`. Raises NotFoundError if the folder has no run."""
    experiment = experiment_of(run)
    async with AsyncExitStack() as stack:
        try:
            pool = TrajectoryPoolServiceStub(await stack.enter_async_context(pool_of(run)))
        except NexrlError as error:
            sys.stderr.write(f"no ledger, so only samples in batches are listed: {error}\n")
            pool = None
        yield Samples(run, experiment.spec, pool)


async def print_list(run: Path, wanted: Filter, *, as_json: bool) -> None:
    """Print the selected samples. Raises NotFoundError if a batch is given and has none of them."""
    limit = LISTED if wanted.limit is None and wanted.batch is None else wanted.limit
    async with samples_of(run) as samples:
        newest: deque[pool_pb.SampleRecord] = deque(maxlen=limit)
        async for record in samples.records():
            if wanted.passes(record):
                newest.append(record)
        found = [await samples.complete(record) for record in newest]
    if not found and wanted.batch is not None:
        raise NotFoundError(f"{run}: batch {wanted.batch} has no such sample")
    for line in json_lines(found) if as_json else table(found):
        sys.stdout.write(line + "\n")


async def print_sample(run: Path, sample_id: str, *, as_json: bool) -> None:
    """Print everything about one sample."""
    async with samples_of(run) as samples:
        sample = await samples.get(sample_id)
    lines = [json.dumps(sample_json(sample))] if as_json else describe(sample, token_decoder(run))
    for line in lines:
        sys.stdout.write(line + "\n")


def table(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a header line and one line per sample."""
    head = ("sample", "state", "attempt", "verdict", "batch", "step", "reward", "tokens", "oldest version", "breaks")
    return columns([head, *map(_row, samples)])


def json_lines(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield one JSON object per trajectory, and one for a sample without trajectories."""
    for sample in samples:
        fields = _sample_fields(sample)
        for trajectory in map(trajectory_json, sample.trajectories):
            yield json.dumps(fields | trajectory)
        if not sample.trajectories:
            yield json.dumps(fields)


def sample_json(sample: Sample) -> Mapping[str, Any]:
    """Return a JSON object for the sample, with all its trajectories."""
    return _sample_fields(sample) | {"trajectories": [trajectory_json(t) for t in sample.trajectories]}


def trajectory_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return a JSON object for a trajectory. Log-probabilities are in nats."""
    return {
        "prompt": trajectory.prompt,
        "response": trajectory.response,
        "reward": trajectory.reward,
        "reward_components": dict(trajectory.reward_components),
        "metadata": dict(trajectory.metadata),
        "finish_reason": trajectory.finish_reason,
        "policy_versions": [[span.start, span.end, span.policy_version] for span in trajectory.spans],
        # As protobuf's JSON, in which a 64-bit seed is a string: many JSON readers would round it.
        "completions": [
            MessageToDict(c, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for c in trajectory.completions
        ],
        "token_ids": list(trajectory.token_ids),
        "loss_mask": [int(trained) for trained in trajectory.loss_mask],
        "logprobs": [round(logprob, 6) for logprob in trajectory.logprobs],
    }


def describe(sample: Sample, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield lines that describe the sample. `decode` returns the text of tokens."""
    ending = sample.record.drop_reason or sample.verdict or "no verdict"
    yield f"sample {sample.record.sample_id}: {sample.state}, {ending}, attempt {sample.attempt or 'unknown'}"
    if sample.batch is not None:
        step = f"trained by step {sample.step}" if sample.step else "not known to be trained"
        yield f"batch {sample.batch}, {step}"
    if not sample.trajectories:
        yield "no trajectories: they do not exist yet, or were dropped before they reached a batch"
    for number, trajectory in enumerate(sample.trajectories, start=1):
        yield from ("", f"trajectory {number} of {len(sample.trajectories)}")
        yield from _trajectory_lines(trajectory, decode)


def draw_text(completion: CompletionSpan) -> str:
    """Return one line that says how a completion was sampled."""
    if not completion.HasField("draw"):
        return "not recorded"
    draw = completion.draw
    seed = f"seed {draw.seed}" if draw.HasField("seed") else "no seed"
    limits = [f"top-p {draw.top_p:g}"] * (0 < draw.top_p < 1) + [f"top-k {draw.top_k}"] * (draw.top_k > 0)
    stop = [f"stop {list(draw.stop)}"] * bool(draw.stop)
    return ", ".join(
        [seed, f"temperature {draw.temperature:g}", *limits, *stop, f"at most {draw.max_new_tokens} tokens"]
    )


def token_decoder(run: Path) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text. Without the model's tokenizer, the text is the ids."""
    try:
        tokenizer = build_tokenizer(experiment_of(run).spec.model)
    except InvalidArgumentError:
        return lambda token_ids: " ".join(map(str, token_ids))
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))


def columns(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the rows as lines with aligned columns."""
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
        trajectories[0].metadata.get("breaks", "-") if trajectories else "-",
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
