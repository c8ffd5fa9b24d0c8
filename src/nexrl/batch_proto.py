"""Leased batches as algorithm processors see them: nexrl.v1.BatchLease -> nexrl.algorithm.Batch."""

import numpy as np

from nexrl.algorithm import Batch, Sample, Trajectory
from nexrl.tensor_proto import decode_tensor
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb


def decode_batch(lease: pool_pb.BatchLease) -> Batch:
    """Return the batch of a lease. Raises InvalidArgumentError for a column that cannot be read."""
    groups = [[_sample(sample) for sample in group.samples] for group in lease.groups]
    return Batch(lease.batch_id, groups, lease.refilled_groups)


def _sample(sample: pb.SampleResult) -> Sample:
    trajectories = [_trajectory(trajectory) for trajectory in sample.trajectories]
    return Sample(sample.sample_id, trajectories, is_truncated=sample.verdict == pb.VERDICT_TRUNCATED)


def _trajectory(trajectory: pb.Trajectory) -> Trajectory:
    return Trajectory(
        np.array(trajectory.token_ids, np.int64),
        np.array(trajectory.loss_mask, np.bool_),
        np.array(trajectory.logprobs, np.float32),
        trajectory.reward,
        trajectory.reward_components,
        trajectory.metadata,
        {name: decode_tensor(f"columns[{name}]", tensor) for name, tensor in trajectory.columns.items()},
    )
