"""Checks the sample results of PutSamples requests, and converts them to what the ledger stores."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from nexrl.column_proto import column_violations
from nexrl.errors import InvalidArgumentError, Violation
from nexrl.v1 import packed_pb2 as packed_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl_trajectory_pool.ledger import SAMPLE_ID, ProducedSample
from nexrl_trajectory_pool.pool import group_key
from nexrl_trajectory_pool.quick_check import are_good
from nexrl_trajectory_pool.sampling import SamplingParameters, logprob_violations

ResultT = TypeVar("ResultT", packed_pb.PackedSampleResult, pb.SampleResult)

SCORED = (pb.VERDICT_OK, pb.VERDICT_TRUNCATED)
FAILED = (pb.VERDICT_ENV_ERROR, pb.VERDICT_REWARD_ERROR, pb.VERDICT_TIMEOUT, pb.VERDICT_CANCELLED_STALE)
MAX_SAMPLE_BYTES = 8 * 1024 * 1024
MAX_VIOLATIONS_SHOWN = 10
MAX_KEPT_ERROR_CHARACTERS = 4096


def produced_samples(
    payloads: Sequence[bytes],
    key_list: Sequence[str] | None,
    vocabulary_size: int | None = None,
    sampling: SamplingParameters | None = None,
    max_tokens: int | None = None,
) -> list[ProducedSample]:
    """Parse and check serialized SampleResults, and return them as the ledger stores them.

    Samples of a validation have `key_list` None, so that they form no groups. Their `sampling` is None, so that any
    sampling parameters are allowed, and trajectories without a trained token. A trajectory has at most
    `max_tokens`, if given. Raises InvalidArgumentError, which names every field that is wrong.
    """
    results = [_parsed(i, payload, packed_pb.PackedSampleResult) for i, payload in enumerate(payloads)]
    violations = [
        violation
        for i, (result, payload) in enumerate(zip(results, payloads, strict=True))
        for violation in _violations(f"results[{i}]", result, len(payload), key_list or ())
    ]
    trajectories = [trajectory for result in results for trajectory in result.trajectories]
    if not are_good(trajectories, vocabulary_size, sampling, max_tokens):
        unpacked = [_parsed(i, payload, pb.SampleResult) for i, payload in enumerate(payloads)]
        violations += _too_long(unpacked, max_tokens)
        violations += _token_violations(unpacked, vocabulary_size, sampling)
    if violations:
        raise InvalidArgumentError("; ".join(map(str, violations[:MAX_VIOLATIONS_SHOWN])), violations=violations)
    return [_produced(result, payload, key_list) for result, payload in zip(results, payloads, strict=True)]


def _parsed(index: int, payload: bytes, kind: type[ResultT]) -> ResultT:
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        violation = Violation(f"results[{index}]", f"not a SampleResult: {error}")
        raise InvalidArgumentError(str(violation), violations=[violation]) from None


def _produced(result: packed_pb.PackedSampleResult, payload: bytes, key_list: Sequence[str] | None) -> ProducedSample:
    if result.verdict not in SCORED:
        failure = pb.Verdict.Name(result.verdict).removeprefix("VERDICT_").lower()
        return ProducedSample(
            result.sample_id, result.attempt, failure=failure, error=result.error[:MAX_KEPT_ERROR_CHARACTERS]
        )
    versions = [span.policy_version for trajectory in result.trajectories for span in trajectory.spans]
    group = None if key_list is None else group_key(key_list, result.sample_id, result.trajectories[0].metadata)
    reward = result.trajectories[-1].reward + 0.0  # as in nexrl.algorithm.Sample; -0.0 becomes 0.0, which it equals
    return ProducedSample(
        result.sample_id, result.attempt, None, group, min(versions), payload, max(versions), repr(reward)
    )


def _violations(
    path: str, result: packed_pb.PackedSampleResult, nbytes: int, key_list: Sequence[str]
) -> Iterator[Violation]:
    if not SAMPLE_ID.fullmatch(result.sample_id):
        yield Violation(f"{path}.sample_id", f"{result.sample_id!r}; must be a sample id from a lease")
    if result.verdict not in SCORED + FAILED:
        yield Violation(f"{path}.verdict", "must be a verdict other than UNSPECIFIED and WORKER_LOST")
    if nbytes > MAX_SAMPLE_BYTES:
        yield Violation(path, f"{nbytes} bytes; at most {MAX_SAMPLE_BYTES}")
    if result.verdict in SCORED and not result.trajectories:
        yield Violation(f"{path}.trajectories", "empty; a scored sample must have at least one")
    if result.verdict not in SCORED and result.trajectories:
        yield Violation(f"{path}.trajectories", "must be empty for a failed sample")
    # The first trajectory decides the group.
    for key in key_list if result.trajectories else ():
        if key != "task_id" and key not in result.trajectories[0].metadata:
            yield Violation(f"{path}.trajectories[0].metadata", f"lacks {key!r}; trajectoryPool.keyList groups by it")


def _too_long(results: Sequence[pb.SampleResult], max_tokens: int | None) -> Iterator[Violation]:
    """Yield trajectories for which the model has too few positions: they would stop the trainer."""
    for i, result in enumerate(results):
        for j, trajectory in enumerate(result.trajectories):
            tokens = len(trajectory.token_ids)
            if max_tokens is not None and tokens > max_tokens:
                limit = f"{tokens} tokens; at most {max_tokens} (inference.maxTokensPerRow)"
                yield Violation(f"results[{i}].trajectories[{j}].token_ids", limit)


def _token_violations(
    results: Sequence[pb.SampleResult], vocabulary_size: int | None, sampling: SamplingParameters | None = None
) -> Iterator[Violation]:
    for index, result in enumerate(results):
        for i, trajectory in enumerate(result.trajectories):
            path = f"results[{index}].trajectories[{i}]"
            yield from _trajectory_violations(path, trajectory)
            if sampling is not None:
                yield from sampling.violations(path, trajectory)
    if vocabulary_size is not None:
        yield from _foreign_tokens(results, vocabulary_size)


def _foreign_tokens(results: Sequence[pb.SampleResult], vocabulary_size: int) -> Iterator[Violation]:
    """Yield a violation for each trajectory with a token id outside the vocabulary. Its batch could not be trained."""
    for i, result in enumerate(results):
        for j, trajectory in enumerate(result.trajectories):
            largest = max(trajectory.token_ids, default=0)
            if largest >= vocabulary_size:
                path = f"results[{i}].trajectories[{j}].token_ids"
                yield Violation(path, f"{largest}; the model has {vocabulary_size} tokens")


def _trajectory_violations(path: str, trajectory: pb.Trajectory) -> Iterator[Violation]:
    tokens = len(trajectory.token_ids)
    if tokens == 0:
        yield Violation(f"{path}.token_ids", "empty")
    elif min(trajectory.token_ids) < 0:
        yield Violation(f"{path}.token_ids", "must not be negative")
    for name in ("loss_mask", "logprobs"):
        length = len(getattr(trajectory, name))
        if length != tokens:
            yield Violation(f"{path}.{name}", f"length {length}; token_ids has {tokens}")
    if trajectory.loss_mask[:1] == [True]:
        yield Violation(f"{path}.loss_mask", "the first token has no context, so it cannot be trained")
    if not math.isfinite(sum(trajectory.logprobs)):
        yield Violation(f"{path}.logprobs", "must be finite numbers")
    yield from logprob_violations(path, trajectory)
    if not math.isfinite(trajectory.reward):
        yield Violation(f"{path}.reward", f"{trajectory.reward}; must be a finite number")
    for name, value in trajectory.reward_components.items():
        if not math.isfinite(value):
            yield Violation(f"{path}.reward_components[{name}]", f"{value}; must be a finite number")
    yield from column_violations(path, trajectory.columns, tokens)
    yield from _span_violations(f"{path}.spans", trajectory)


def _span_violations(path: str, trajectory: pb.Trajectory) -> Iterator[Violation]:
    if not trajectory.spans:
        yield Violation(path, "empty; at least one token was generated by a policy version")
    covered, end = 0, 0
    for i, span in enumerate(trajectory.spans):
        if not end <= span.start < span.end <= len(trajectory.token_ids):
            bounds = f"start must be at least {end}, end must be above start and at most {len(trajectory.token_ids)}"
            yield Violation(f"{path}[{i}]", f"[{span.start}, {span.end}); {bounds}")
            return
        if span.policy_version < 0:
            yield Violation(f"{path}[{i}].policy_version", f"{span.policy_version}; at least 0")
        covered += sum(trajectory.loss_mask[span.start : span.end])
        end = span.end
    if trajectory.spans and covered != sum(trajectory.loss_mask):
        trained = sum(trajectory.loss_mask)
        yield Violation(path, f"cover {covered} of the {trained} tokens with loss_mask true; must cover all of them")
