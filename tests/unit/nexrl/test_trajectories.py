"""`nexrl trajectories`: what it prints of a batch."""

import json
from pathlib import Path

import pytest

from nexrl.errors import NotFoundError
from nexrl.local.trajectories import lines, read_batch
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1.trajectory_pool_service_pb2 import BatchLease


def write_batch(run: Path, number: int) -> None:
    (run / "trajectories").mkdir(exist_ok=True)
    trajectory = pb.Trajectory(
        token_ids=[1, 7], loss_mask=[False, True], logprobs=[0, -0.5], prompt="1=", response="1", reward=0.25
    )
    sample = pb.SampleResult(sample_id="3.0", attempt=1, verdict=pb.VERDICT_OK, trajectories=[trajectory])
    lease = BatchLease(batch_id=number, groups=[pb.Group(group_id="3", samples=[sample])])
    (run / "trajectories" / f"batch_{number:06d}.pb").write_bytes(lease.SerializeToString())


def test_the_newest_batch_is_read_unless_one_is_named(tmp_path: Path) -> None:
    for number in (0, 1):
        write_batch(tmp_path, number)
    assert read_batch(tmp_path, None).batch_id == 1
    assert read_batch(tmp_path, 0).batch_id == 0


def test_a_trajectory_is_one_json_object(tmp_path: Path) -> None:
    write_batch(tmp_path, 0)
    (line,) = lines(read_batch(tmp_path, 0))
    printed = json.loads(line)
    assert (printed["sample"], printed["verdict"], printed["reward"]) == ("3.0", "OK", 0.25)
    assert (printed["token_ids"], printed["loss_mask"], printed["logprobs"]) == ([1, 7], [0, 1], [0.0, -0.5])


def test_a_batch_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no batch 4"):
        read_batch(tmp_path, 4)
