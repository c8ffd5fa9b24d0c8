"""What supervised fine-tuning (rollout.type demonstrations) requires.

Nothing is sampled from the policy. So a task has one sample, and there are neither probabilities of a rollout to
compare with nor rewards to learn from.
"""

from collections.abc import Iterator
from functools import singledispatch

from nexrl.spec.algorithm import AlgorithmSpec, Grpo, OwnLoss
from nexrl.spec.correction import CorrectionSpec, correction_is_off
from nexrl.spec.critic import Ppo
from nexrl.spec.data import DataSpec, FileDataSpec
from nexrl.spec.rollout import RolloutSpec
from nexrl.spec.section import Section, refuse_key
from nexrl.spec.trajectory_pool import TrajectoryPoolSpec
from nexrl.spec.weight_sync import FullyAsyncWeightSync, WeightSyncSpec


def check_data(data: DataSpec | None) -> None:
    """Raise the error of the validator of `rollout` if the tasks are no demonstrations."""
    if isinstance(data, FileDataSpec) and not data.answer_field:
        raise refuse_key("type", "demonstrations", "the answers are trained, and data.answerField is empty; name it")
    if data is not None and data.sampler is not None:
        reason = "demonstrations have no rewards, by which data.sampler chooses; remove it"
        raise refuse_key("type", "demonstrations", reason)


@singledispatch
def check(section: Section) -> None:
    """Raise the error of a validator if a section of the experiment does not fit demonstrations."""


@check.register
def _(rollout: RolloutSpec) -> None:
    for key, value, needed in (
        ("temperature", rollout.temperature, 1),
        ("topP", rollout.top_p, 1),
        ("topK", rollout.top_k, 0),
    ):
        if value != needed:
            raise refuse_key(key, value, f"demonstrations are not sampled; use {needed}")


@check.register
def _(pool: TrajectoryPoolSpec) -> None:
    if pool.group_size != 1:
        raise refuse_key("groupSize", pool.group_size, "a task has one demonstration (rollout.type); use 1")


@check.register
def _(algorithm: AlgorithmSpec) -> None:
    if isinstance(algorithm, Ppo):
        raise refuse_key("type", algorithm.type, "demonstrations have no rewards, from which a critic learns; use grpo")
    is_own = isinstance(algorithm, OwnLoss)
    if algorithm.loss != "cross_entropy" and not is_own:
        raise refuse_key(
            "loss", algorithm.loss, "it needs samples of the policy, not demonstrations; use cross_entropy"
        )
    if is_own and algorithm.processor == "builtin" and algorithm.zero_variance_groups != "keep":
        reason = "a demonstration is compared with no other, so none would be trained; use keep"
        raise refuse_key("zeroVarianceGroups", algorithm.zero_variance_groups, reason)
    if isinstance(algorithm, Grpo) and algorithm.advantage != "group_mean":
        raise refuse_key("advantage", algorithm.advantage, "demonstrations have no rewards; remove it")
    if algorithm.correction != CorrectionSpec():
        raise refuse_key("correction", algorithm.correction.model_dump(), "demonstrations have no ratio; remove it")
    if algorithm.kl_coefficient > 0 and algorithm.kl_estimator == "k3_unbiased":
        raise refuse_key("klEstimator", algorithm.kl_estimator, "demonstrations have no ratio; use k2 or k3")
    if algorithm.teacher is not None:
        raise refuse_key("teacher", algorithm.teacher.path, "it judges samples of the policy; remove it")
    if algorithm.kl_reward_coefficient:
        raise refuse_key("klRewardCoefficient", algorithm.kl_reward_coefficient, "no reward is trained; remove it")
    if algorithm.overlong_penalty is not None:
        raise refuse_key("overlongPenalty", algorithm.overlong_penalty.model_dump(), "no reward is trained; remove it")


@check.register
def _(weight_sync: WeightSyncSpec) -> None:
    if isinstance(weight_sync, FullyAsyncWeightSync):
        reason = "it drops what is too stale, and demonstrations do not age; use sync or batch-async"
        raise refuse_key("mode", weight_sync.mode, reason)


def cel_conditions() -> Iterator[tuple[str, str, str]]:
    """Yield the same rules as CEL: the field of the spec, the condition that must hold, and the message."""
    for key, needed in (("temperature", "1.0"), ("topP", "1.0"), ("topK", "0")):
        yield f"rollout.{key}", f"self.rollout.{key} == {needed}", f"demonstrations are not sampled; use {needed}"
    yield (
        "rollout.type",
        "!has(self.data.sampler)",
        "demonstrations have no rewards, by which data.sampler chooses; remove it",
    )
    yield (
        "algorithm.advantage",
        "!has(self.algorithm.advantage) || self.algorithm.advantage == 'group_mean'",
        "demonstrations have no rewards; remove it",
    )
    yield (
        "rollout.type",
        "!has(self.data.answerField) || self.data.answerField != ''",
        "the answers are trained, and data.answerField is empty; name it",
    )
    yield "trajectoryPool.groupSize", "self.trajectoryPool.groupSize == 1", "a task has one demonstration; use 1"
    yield (
        "algorithm.type",
        "self.algorithm.type != 'ppo'",
        "demonstrations have no rewards, from which a critic learns; use grpo",
    )
    yield (
        "algorithm.loss",
        "self.algorithm.loss == 'cross_entropy' || self.algorithm.loss.contains(':')",
        "it needs samples of the policy, not demonstrations; use cross_entropy",
    )
    yield (
        "algorithm.zeroVarianceGroups",
        "!self.algorithm.loss.contains(':') || self.algorithm.processor != 'builtin'"
        " || self.algorithm.zeroVarianceGroups == 'keep'",
        "a demonstration is compared with no other, so none would be trained; use keep",
    )
    yield (
        "algorithm.correction",
        correction_is_off("self.algorithm"),
        "demonstrations have no ratio; remove it",
    )
    yield (
        "algorithm.klEstimator",
        "self.algorithm.klCoefficient == 0.0 || self.algorithm.klEstimator != 'k3_unbiased'",
        "demonstrations have no ratio; use k2 or k3",
    )
    yield "algorithm.teacher", "!has(self.algorithm.teacher)", "it judges samples of the policy; remove it"
    yield (
        "algorithm.klRewardCoefficient",
        "self.algorithm.klRewardCoefficient == 0.0",
        "no reward is trained; remove it",
    )
    yield "algorithm.overlongPenalty", "!has(self.algorithm.overlongPenalty)", "no reward is trained; remove it"
    yield (
        "weightSync.mode",
        "self.weightSync.mode != 'fully-async'",
        "it drops what is too stale, and demonstrations do not age; use sync or batch-async",
    )
