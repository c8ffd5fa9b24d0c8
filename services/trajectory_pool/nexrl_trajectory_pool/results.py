"""Sample results at the edge: checked, and turned into what the ledger stores."""

import math
from collections.abc import Sequence

from nexrl.errors import InvalidArgumentError, Violation
from nexrl.v1 import trajectory_pb2 as pb
from nexrl_trajectory_pool.ledger import ProducedSample
from nexrl_trajectory_pool.pool import group_key

SCORED = (pb.VERDICT_OK, pb.VERDICT_TRUNCATED)
MAX_SAMPLE_BYTES = 8 * 1024 * 1024
MAX_ERROR_CHARACTERS = 4096


def produced_samples(results: Sequence[pb.SampleResult], key_list: Sequence[str] | None) -> list[ProducedSample]:
    """The results for the ledger; `key_list` None forms no groups (validation).

    Raises InvalidArgumentError that names every field that is wrong; nothing is stored then.
    """
    violations = [v for i, result in enumerate(results) for v in _violations(f"results[{i}]", result)]
    if violations:
        raise InvalidArgumentError("; ".join(map(str, violations[:10])), violations=violations)
    return [_produced(result, key_list) for result in results]


def _produced(result: pb.SampleResult, key_list: Sequence[str] | None) -> ProducedSample:
    if result.verdict not in SCORED:
        failure = pb.Verdict.Name(result.verdict).removeprefix("VERDICT_").lower()
        return ProducedSample(result.sample_id, result.attempt, failure=failure)
    oldest = min((span.policy_version for t in result.trajectories for span in t.spans), default=0)
    metadata = dict(result.trajectories[0].metadata)
    leaf = None if key_list is None else group_key(key_list, result.sample_id, metadata)
    return ProducedSample(result.sample_id, result.attempt, None, leaf, oldest, result.SerializeToString())


def _violations(path: str, result: pb.SampleResult) -> list[Violation]:
    group, dot, index = result.sample_id.partition(".")
    violations = []
    if not (dot and group.isdigit() and index.isdigit()):
        violations.append(Violation(f"{path}.sample_id", f"{result.sample_id!r}; a sample id from a lease is needed"))
    if result.verdict in (pb.VERDICT_UNSPECIFIED, pb.VERDICT_WORKER_LOST):
        violations.append(Violation(f"{path}.verdict", "a verdict other than UNSPECIFIED and WORKER_LOST is needed"))
    if result.ByteSize() > MAX_SAMPLE_BYTES:
        violations.append(Violation(path, f"{result.ByteSize()} bytes; at most {MAX_SAMPLE_BYTES}"))
    if result.verdict in SCORED and not result.trajectories:
        violations.append(Violation(f"{path}.trajectories", "empty; a scored sample has at least one"))
    if result.verdict not in SCORED and result.trajectories:
        violations.append(Violation(f"{path}.trajectories", "a failed sample has none"))
    for i, trajectory in enumerate(result.trajectories):
        violations += _trajectory_violations(f"{path}.trajectories[{i}]", trajectory)
    return violations


def _trajectory_violations(path: str, trajectory: pb.Trajectory) -> list[Violation]:
    tokens = len(trajectory.token_ids)
    violations = []
    if tokens == 0:
        violations.append(Violation(f"{path}.token_ids", "empty"))
    for name in ("loss_mask", "logprobs"):
        length = len(getattr(trajectory, name))
        if length != tokens:
            violations.append(Violation(f"{path}.{name}", f"length {length}; token_ids has {tokens}"))
    if not math.isfinite(sum(trajectory.logprobs)):
        violations.append(Violation(f"{path}.logprobs", "not finite"))
    if not math.isfinite(trajectory.reward):
        violations.append(Violation(f"{path}.reward", f"{trajectory.reward}; a finite number is needed"))
    covered = sum(span.end - span.start for span in trajectory.spans)
    if not violations and covered < sum(trajectory.loss_mask):
        violations.append(
            Violation(f"{path}.spans", f"cover {covered} of {sum(trajectory.loss_mask)} generated tokens")
        )
    return violations
