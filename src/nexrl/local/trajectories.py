"""`nexrl trajectories`: the samples of a batch, for people and for `jq`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nexrl.errors import NotFoundError
from nexrl.v1.trajectory_pb2 import SampleResult, Verdict
from nexrl.v1.trajectory_pool_service_pb2 import BatchLease


def read_batch(run_folder: Path, batch: int | None) -> BatchLease:
    """Batch number `batch` of a run, the newest when None. Raises NotFoundError."""
    paths = sorted((run_folder / "trajectories").glob("batch_*.pb"))
    chosen = paths[-1:] if batch is None else [path for path in paths if path.stem == f"batch_{batch:06d}"]
    if not chosen:
        what = "no batch" if batch is None else f"no batch {batch}"
        raise NotFoundError(f"{run_folder}: {what} there; it has {len(paths)} batches in trajectories/")
    return BatchLease.FromString(chosen[0].read_bytes())


def lines(lease: BatchLease) -> Iterator[str]:
    """One JSON object for each trajectory."""
    for group in lease.groups:
        for sample in group.samples:
            for trajectory in _trajectories(sample):
                yield json.dumps({"batch": lease.batch_id, "group": group.group_id, **trajectory})


def _trajectories(sample: SampleResult) -> Iterator[Mapping[str, Any]]:
    for trajectory in sample.trajectories:
        yield {
            "sample": sample.sample_id,
            "verdict": Verdict.Name(sample.verdict).removeprefix("VERDICT_"),
            "prompt": trajectory.prompt,
            "response": trajectory.response,
            "reward": trajectory.reward,
            "reward_components": dict(trajectory.reward_components),
            "finish_reason": trajectory.finish_reason,
            "policy_versions": [[span.start, span.end, span.policy_version] for span in trajectory.spans],
            "token_ids": list(trajectory.token_ids),
            "loss_mask": [int(trained) for trained in trajectory.loss_mask],
            "logprobs": [round(logprob, 6) for logprob in trajectory.logprobs],
        }
