"""The algorithm processor's own part: what it makes of a leased batch."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from nexrl.activity import ActivityTracker
from nexrl.rpc.client import connect
from nexrl.spec.experiment import AlgorithmSpec
from nexrl.v1.activity_service_pb2 import Module
from nexrl.v1.train_batch_pool_service_pb2 import TrainBatch
from nexrl.v1.trajectory_pb2 import VERDICT_OK, VERDICT_TRUNCATED, Group, PolicySpan, SampleResult, Trajectory
from nexrl.v1.trajectory_pool_service_pb2 import BatchLease
from nexrl_trainer.codec import decode_train_batch
from nexrl_trainer.processor import AlgorithmProcessor


class Builder:
    """Builds processors, none of which talks to anybody."""

    def __init__(self, channel: object, folder: Path) -> None:
        self._channel, self._folder = channel, folder

    def __call__(self, kind: type[AlgorithmProcessor] = AlgorithmProcessor, **algorithm: object) -> AlgorithmProcessor:
        settings = AlgorithmSpec.model_validate(algorithm)
        activity = ActivityTracker(Module(name="trainer"), None)
        return kind(settings, self._channel, "default", activity, self._folder)  # type: ignore[arg-type]


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Builder]:
    async with connect("127.0.0.1:1") as channel:
        yield Builder(channel, tmp_path)


def sample(sample_id: str, reward: float, version: int = 4) -> SampleResult:
    trajectory = Trajectory(
        token_ids=[5, 6, 7],
        loss_mask=[False, True, True],
        logprobs=[0, -0.5, -0.25],
        spans=[PolicySpan(start=1, end=3, policy_version=version)],
        reward=reward,
    )
    verdict = VERDICT_OK if reward else VERDICT_TRUNCATED
    return SampleResult(sample_id=sample_id, attempt=1, verdict=verdict, trajectories=[trajectory])


def lease() -> BatchLease:
    """Batch 4: a group with a better and a worse sample, and one whose samples are equal."""
    groups = [
        Group(group_id="0", samples=[sample("0.0", 1.0), sample("0.1", 0.0, version=3)]),
        Group(group_id="1", samples=[sample("1.0", 1.0), sample("1.1", 1.0)]),
    ]
    return BatchLease(batch_id=4, attempt=1, model_tag="default", groups=groups, data_cursor=9)


@pytest.mark.guide("I1", "I6")
async def test_a_batch_becomes_advantages_by_group_with_masks_and_logprobs(build: Builder) -> None:
    prepared = build(advantage="group_mean", zero_variance_groups="keep").fit(lease())
    batch = decode_train_batch(prepared.tensors)
    assert batch.advantages_N.tolist() == [0.5] * 3 + [-0.5] * 3 + [0.0] * 6
    assert batch.loss_mask_N.tolist() == [False, True, True] * 4
    np.testing.assert_array_equal(batch.rollout_logprobs_N, np.array([0, -0.5, -0.25] * 4, np.float32))


async def test_a_sample_of_several_trajectories_counts_once_in_its_group(build: Builder) -> None:
    several = lease()
    several.groups[0].samples[1].trajectories.extend(several.groups[0].samples[1].trajectories[:1] * 2)
    batch = decode_train_batch(build(advantage="group_mean").fit(several).tensors)
    assert batch.advantages_N.reshape(-1, 3)[:, 0].tolist() == [0.5, -0.5, -0.5, -0.5]


async def test_metrics_tell_what_a_batch_is_made_of(build: Builder) -> None:
    metrics = build().fit(lease()).metrics
    assert (metrics["samples"], metrics["reward_mean"], metrics["response_tokens"]) == (4, 0.75, 2)
    assert (metrics["staleness_steps"], metrics["staleness_steps_max"]) == (0.25, 1)
    assert (metrics["truncated_fraction"], metrics["zero_variance_group_fraction"]) == (0.25, 0.5)


async def test_groups_without_a_difference_are_left_out_unless_they_are_kept(build: Builder) -> None:
    assert len(decode_train_batch(build().fit(lease()).tensors).lengths_B) == 2


@pytest.mark.guide("Q15")
async def test_mock_takes_rewards_as_advantages(build: Builder) -> None:
    prepared = build(type="mock", zero_variance_groups="keep").fit(lease())
    assert decode_train_batch(prepared.tensors).advantages_N.tolist() == [1.0] * 3 + [0.0] * 3 + [1.0] * 6


class Doubled(AlgorithmProcessor):
    """A user's processor: one method."""

    def fit(self, lease: BatchLease) -> TrainBatch:
        prepared = super().fit(lease)
        prepared.metrics["doubled"] = 2 * prepared.metrics["reward_mean"]
        return prepared


@pytest.mark.guide("R4")
async def test_a_subclass_overrides_what_becomes_of_a_batch(build: Builder) -> None:
    assert build(Doubled).fit(lease()).metrics["doubled"] == 1.5
