"""The algorithm processor's own part: what it makes of a leased batch."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from nexrl.activity import ActivityTracker
from nexrl.client import BatchClient
from nexrl.errors import NexrlError
from nexrl.rollout_worker import with_columns
from nexrl.rpc.client import connect
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.overlong_penalty import OverlongPenaltySpec
from nexrl.v1.activity_service_pb2 import Module
from nexrl.v1.trajectory_pb2 import VERDICT_OK, VERDICT_TRUNCATED, Group, PolicySpan, SampleResult, Trajectory
from nexrl.v1.trajectory_pool_service_pb2 import BatchLease
from nexrl_trainer.processor import AlgorithmProcessor, Forward, build_processor


def forward(logprob: float) -> Forward:
    """A model under which every trained token has this log-probability."""
    return lambda batch: np.where(batch.loss_mask_N, np.float32(logprob), np.float32(0))


POLICY, REFERENCE, TEACHER = forward(-0.75), forward(-2.0), forward(-1.0)


class Builder:
    """Builds processors, none of which talks to anybody. User code lies in `folder`."""

    def __init__(self, client: BatchClient, folder: Path) -> None:
        self._client, self.folder = client, folder

    def __call__(self, **algorithm: object) -> AlgorithmProcessor:
        processor = build_processor(AlgorithmSpec.model_validate(algorithm), self.folder, POLICY, REFERENCE, TEACHER)
        activity = ActivityTracker(Module(name="trainer"), None)
        return AlgorithmProcessor(processor, self._client, activity, self.folder, REFERENCE)

    def user_code(self, module: str, text: str) -> None:
        """Write a module of the user."""
        (self.folder / f"{module}.py").write_text(text)


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Builder]:
    async with connect("127.0.0.1:1") as channel:
        yield Builder(BatchClient(channel, worker_id="trainer"), tmp_path)


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


@pytest.mark.guide("I1")
def test_cross_entropy_trains_a_sample_that_stands_alone_and_drops_equal_ones_of_a_group(build: Builder) -> None:
    groups = [
        Group(group_id="0", samples=[sample("0.0", 1.0)]),
        Group(group_id="1", samples=[sample("1.0", 1.0), sample("1.1", 1.0)]),
    ]
    batch, metrics = build(loss="cross_entropy", zero_variance_groups="drop").fit(BatchLease(groups=groups))
    assert batch.token_count == 2  # those of the first sample
    assert metrics["zero_variance_group_fraction"] == 0.5


@pytest.mark.guide("I1", "I6")
async def test_a_batch_becomes_advantages_by_group_with_masks_and_logprobs(build: Builder) -> None:
    batch, _ = build(advantage="group_mean", zero_variance_groups="keep").fit(lease())
    assert batch.advantages_N.tolist() == [0.5] * 3 + [-0.5] * 3 + [0.0] * 6
    assert batch.loss_mask_N.tolist() == [False, True, True] * 4
    np.testing.assert_array_equal(batch.rollout_logprobs_N, np.array([0, -0.5, -0.25] * 4, np.float32))


async def test_a_sample_of_several_trajectories_counts_once_in_its_group(build: Builder) -> None:
    several = lease()
    several.groups[0].samples[1].trajectories.extend(several.groups[0].samples[1].trajectories[:1] * 2)
    batch, _ = build(advantage="group_mean").fit(several)
    assert batch.advantages_N.reshape(-1, 3)[:, 0].tolist() == [0.5, -0.5, -0.5, -0.5]


async def test_metrics_tell_what_a_batch_is_made_of(build: Builder) -> None:
    _, metrics = build().fit(lease())
    assert (metrics["samples"], metrics["reward_mean"], metrics["response_tokens"]) == (4, 0.75, 2)
    assert (metrics["staleness_steps"], metrics["staleness_steps_max"]) == (0.25, 1)
    assert (metrics["truncated_fraction"], metrics["zero_variance_group_fraction"]) == (0.25, 0.5)


@pytest.mark.parametrize("zero_variance_groups", ["drop", "refill"])
async def test_groups_without_a_difference_are_left_out_unless_they_are_kept(
    build: Builder, zero_variance_groups: str
) -> None:
    batch, _ = build(zero_variance_groups=zero_variance_groups).fit(lease())
    assert len(batch.lengths_B) == 2


async def test_groups_that_the_pool_refilled_count_as_groups_without_a_difference(build: Builder) -> None:
    refilled = lease()
    refilled.refilled_groups = 2
    _, metrics = build(zero_variance_groups="refill").fit(refilled)
    assert (metrics["refilled_groups"], metrics["zero_variance_group_fraction"]) == (2, 0.75)


async def test_a_batch_baseline_does_not_look_for_differences_within_groups(build: Builder) -> None:
    batch, metrics = build(advantage="batch_mean_std").fit(lease())
    assert len(batch.lengths_B) == 4
    assert batch.advantages_N[9] > 0
    assert metrics["zero_variance_group_fraction"] == 0


async def test_truncated_samples_count_in_the_baseline_and_are_not_trained_if_they_are_dropped(build: Builder) -> None:
    batch, _ = build(truncated_samples="drop").fit(lease())
    assert batch.advantages_N.tolist() == [0.5] * 3


async def test_samples_of_equal_rewards_are_dropped_whatever_their_penalties(build: Builder) -> None:
    long = lease()
    long.groups[1].samples[0].trajectories[0].loss_mask[:] = [False, True, False]
    batch, metrics = build(overlong_penalty=OverlongPenaltySpec(after_tokens=0, full_tokens=4)).fit(long)
    assert len(batch.lengths_B) == 2
    assert metrics["zero_variance_group_fraction"] == 0.5


@pytest.mark.parametrize(("choice", "trained"), [({"type": "mock"}, 1), ({"advantage": "rloo"}, 0)])
async def test_a_sample_without_others_is_dropped_only_if_its_advantage_needs_them(
    build: Builder, choice: dict[str, str], trained: int
) -> None:
    group = Group(group_id="0", samples=[sample("0.0", 1.0)])
    batch, _ = build(**choice).fit(BatchLease(batch_id=0, attempt=1, model_tag="default", groups=[group]))
    assert len(batch.lengths_B) == trained


async def test_penalties_change_the_advantages_and_are_a_metric(build: Builder) -> None:
    penalty = OverlongPenaltySpec(after_tokens=0, full_tokens=4, penalty=1.0)
    long = lease()
    del long.groups[0].samples[0].trajectories[0].loss_mask[-1]
    long.groups[0].samples[0].trajectories[0].loss_mask.append(False)  # it has one generated token, others have two
    batch, metrics = build(overlong_penalty=penalty).fit(long)
    assert batch.advantages_N[0] == pytest.approx((0.75 - -0.5) / 2)
    assert metrics["reward_penalty_mean"] == pytest.approx((0.25 + 3 * 0.5) / 4)


@pytest.mark.guide("Q15")
async def test_mock_takes_rewards_as_advantages(build: Builder) -> None:
    batch, _ = build(type="mock", zero_variance_groups="keep").fit(lease())
    assert batch.advantages_N.tolist() == [1.0] * 3 + [0.0] * 3 + [1.0] * 6


MINE = """
import numpy as np
from nexrl.algorithm import Batch, PreparedBatch, Processor


class Mine(Processor):
    def fit(self, batch: Batch) -> PreparedBatch:
        sequences = []
        for group in batch.groups:
            baseline = np.mean([sample.reward for sample in group])
            for sample in group:
                for trajectory in sample.trajectories:
                    sequence = trajectory.sequence(0.0)
                    policy, = self.context.policy_logprobs([sequence])
                    reference, = self.context.reference_logprobs([sequence])
                    gain = (sample.reward - baseline) + 0.1 * (reference - policy)
                    sequences.append(trajectory.sequence(gain, {"gain": gain, "truncated": sample.is_truncated}))
        return PreparedBatch(sequences, {"doubled": 2.0 * batch.rewards_B.mean()})


class Broken(Processor):
    def fit(self, batch):
        return 1 / 0


class Short(Processor):
    def fit(self, batch):
        trajectory = batch.samples[0].trajectories[0]
        return PreparedBatch([trajectory.sequence(0.0, {"short": np.zeros(2)})])


class Exits(Processor):
    def fit(self, batch):
        raise SystemExit(1)


class ExitsAtOnce(Exits):
    def __init__(self, context):
        raise SystemExit(1)


class Wrong(Processor):
    def fit(self, batch):
        return []


def advantage(rewards_B, groups_B):
    return (rewards_B - 0.25).astype(np.float32)


def one_number(rewards_B, groups_B):
    return 0.5


def exits(rewards_B, groups_B):
    raise SystemExit(1)


def infinite(rewards_B, groups_B):
    return rewards_B / 0.0
"""


@pytest.mark.guide("R4")
async def test_a_class_of_the_user_decides_what_becomes_of_a_batch(build: Builder) -> None:
    build.user_code("mine", MINE)
    batch, metrics = build(processor="mine:Mine").fit(lease())
    gains = np.repeat([0.5, -0.5, 0.0, 0.0], 3) + 0.1 * np.where(batch.loss_mask_N, -2.0 + 0.75, 0.0)
    np.testing.assert_allclose(batch.advantages_N, gains, rtol=1e-6)
    np.testing.assert_allclose(batch.columns["gain"], gains, rtol=1e-6)
    assert batch.columns["truncated"].tolist() == [False, True, False, False]
    assert (metrics["doubled"], metrics["reward_mean"]) == (1.5, 0.75)


async def test_an_advantage_of_the_user_is_used_by_the_built_in_processor(build: Builder) -> None:
    build.user_code("mine_too", MINE)
    batch, _ = build(advantage="mine_too:advantage", zero_variance_groups="keep").fit(lease())
    assert batch.advantages_N.tolist() == [0.75] * 3 + [-0.25] * 3 + [0.75] * 6


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("processor", "Broken", "algorithm.processor bad:Broken: ZeroDivisionError .*: division by zero"),
        ("processor", "Exits", "algorithm.processor bad:Exits: SystemExit .*: 1"),
        ("processor", "ExitsAtOnce", "algorithm.processor bad:ExitsAtOnce: SystemExit .*: 1"),
        ("processor", "Wrong", "algorithm.processor bad:Wrong: fit returned list; a PreparedBatch is needed"),
        ("processor", "Short", r"bad:Short: train batch: sequences\[0\].columns\[short\]: has shape \(2,\)"),
        ("processor", "advantage", "algorithm.processor bad:advantage: not a subclass of nexrl.algorithm.Processor"),
        ("processor", "Missing", "bad:Missing: .* has no Missing"),
        ("advantage", "one_number", r"algorithm.advantage bad:one_number: returned shape \[\]; one per sample, \[4\]"),
        ("advantage", "exits", "algorithm.advantage bad:exits: SystemExit .*: 1"),
        ("advantage", "infinite", "algorithm.advantage bad:infinite: an advantage is not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
async def test_errors_of_user_code_name_its_reference(build: Builder, key: str, name: str, message: str) -> None:
    build.user_code("bad", MINE)
    with pytest.raises(NexrlError, match=message):
        build(**{key: f"bad:{name}"}).fit(lease())


async def test_a_processor_of_the_user_is_named_if_it_gives_a_critic_no_rewards(build: Builder) -> None:
    build.user_code("bad", MINE)
    with pytest.raises(NexrlError, match=r"bad:Mine: train batch: columns\[rewards\]"):
        build(type="ppo", processor="bad:Mine").fit(lease())


async def test_reference_logprobs_are_added_where_the_loss_has_a_penalty(build: Builder) -> None:
    batch, _ = build(kl_coefficient=0.1).fit(lease())
    assert batch.reference_logprobs_N is not None
    assert batch.reference_logprobs_N.tolist() == [0, -2, -2] * 2


async def test_dpo_trains_pairs_of_a_group_with_reference_logprobs(build: Builder) -> None:
    batch, metrics = build(loss="dpo").fit(lease())
    assert batch.columns["pair"].tolist() == [1, -1]
    assert batch.advantages_N.tolist() == [1.0] * 3 + [-1.0] * 3
    assert batch.reference_logprobs_N is not None
    assert metrics["preference_pairs"] == 1


async def test_reference_logprobs_of_a_moving_reference_are_left_to_the_step(build: Builder) -> None:
    batch, _ = build(kl_coefficient=0.1, reference={"type": "average", "decay": 0.9}).fit(lease())
    assert batch.reference_logprobs_N is None


async def test_dpo_pairs_no_sample_that_is_dropped(build: Builder) -> None:
    batch, metrics = build(loss="dpo", truncated_samples="drop").fit(lease())
    assert (len(batch.lengths_B), metrics["preference_pairs"]) == (0, 0)


@pytest.mark.parametrize(("advantage", "of_rewards"), [("group_mean", [0.5, -0.5, 0, 0]), ("distillation", [0] * 4)])
async def test_a_teacher_judges_each_token_also_of_samples_whose_rewards_are_equal(
    build: Builder, advantage: str, of_rewards: list[float]
) -> None:
    batch, metrics = build(advantage=advantage, teacher={"path": "teacher", "coefficient": 2.0}).fit(lease())
    expected_BT = np.array(of_rewards)[:, None] + 2.0 * np.array([0, -1.0 + 0.5, -1.0 + 0.25])
    np.testing.assert_allclose(batch.advantages_N.reshape(4, 3), expected_BT)
    assert metrics["teacher_kl"] == pytest.approx(0.625)


async def test_columns_of_trajectories_reach_the_train_batch(build: Builder) -> None:
    carrying = lease()
    for number, group in enumerate(carrying.groups):
        for one in group.samples:
            with_columns(one.trajectories[0], {"turn": [0, 1, 1], "difficulty": number / 2})
    batch, _ = build(zero_variance_groups="keep").fit(carrying)
    assert batch.columns["turn"].tolist() == [0, 1, 1] * 4
    assert batch.columns["difficulty"].tolist() == [0, 0, 0.5, 0.5]
    del carrying.groups[1].samples[0].trajectories[0].columns["turn"]
    batch, _ = build(zero_variance_groups="keep").fit(carrying)
    np.testing.assert_array_equal(batch.columns["turn"], [0, 1, 1] * 2 + [np.nan] * 3 + [0, 1, 1])
