"""Sample results: how an attempt is told to the pool."""

from collections.abc import Sequence

from nexrl.v1.trajectory_pb2 import (
    VERDICT_OK,
    VERDICT_TRUNCATED,
    SampleLease,
    SampleResult,
    TaskLease,
    Trajectory,
    Verdict,
)

MAX_ERROR_CHARACTERS = 4096


def scored(sample: SampleLease, trajectories: Sequence[Trajectory], finish_reason: str) -> SampleResult:
    """A sample with a reward: TRUNCATED when its last completion was cut by a limit, else OK."""
    return SampleResult(
        sample_id=sample.sample_id,
        attempt=sample.attempt,
        verdict=VERDICT_TRUNCATED if finish_reason == "length" else VERDICT_OK,
        trajectories=trajectories,
    )


def failed(sample: SampleLease, verdict: Verdict.ValueType, error: object) -> SampleResult:
    """A sample without a reward."""
    return SampleResult(
        sample_id=sample.sample_id, attempt=sample.attempt, verdict=verdict, error=str(error)[:MAX_ERROR_CHARACTERS]
    )


def all_failed(lease: TaskLease, verdict: Verdict.ValueType, error: object) -> list[SampleResult]:
    """Every sample of a lease failed in the same way."""
    return [failed(sample, verdict, error) for sample in lease.samples]
