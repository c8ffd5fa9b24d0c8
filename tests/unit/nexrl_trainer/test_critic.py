"""The critic: what it learns, that any split gives the same, and that a resume continues with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from nexrl.critic_columns import RETURNS, REWARDS, SAMPLE, VALUES
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, TrainingFailedError
from nexrl.models import iter_weights
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch
from nexrl_trainer.checkpoint import CheckpointMetadata, load_checkpoint
from nexrl_trainer.critic import value_loss
from nexrl_trainer.step import Learner
from tests.support.checkpoints import save_checkpoint

BuildLearner = Callable[..., Learner]
BuildBatch = Callable[..., TrainBatch]


def rewarded(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """Add a reward of each trained token. Two sequences are a sample."""
    rewards_N = np.random.default_rng(seed).normal(size=len(batch.token_ids_N)).astype(np.float32) * batch.loss_mask_N
    columns: dict[str, np.ndarray] = {REWARDS: rewards_N, SAMPLE: np.arange(len(batch.lengths_B)) // 2}
    return replace(batch, columns=columns)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iter_weights(learner.model)}


def critic_of(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner.critic
    return {name: tensor.clone() for name, tensor in learner.critic.tensors().items() if ".weight." in name}


def test_the_value_loss_is_half_the_square_of_the_error_and_clipped_around_the_earlier_value() -> None:
    values_P = torch.tensor([1.0, 3.0, 0.0], requires_grad=True)
    earlier_P, returns_P, weights_P = (
        torch.tensor([1.0, 1.0, 1.0]),
        torch.tensor([2.0, 2.0, 2.0]),
        torch.full((3,), 0.5),
    )
    assert value_loss(values_P, earlier_P, returns_P, weights_P, None).item() == 0.5 * (1 + 1 + 4) / 2
    clipped = value_loss(values_P, earlier_P, returns_P, weights_P, 0.25)
    # 3.0 counts as itself, since 1.25 would have a smaller error; so does 0.0, whose error is larger than that of 0.75.
    assert clipped.item() == 0.5 * (1 + max(1, 0.75**2) + 4) / 2
    toward = value_loss(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([2.0]), torch.ones(1), 0.5)
    assert toward.item() == 1.5**2 / 2  # as far as it may come near in one step


def test_values_begin_at_0_and_learn_the_returns(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    learner = build_learner(type="ppo", critic={"learning_rate": 1e-2, "value_clip": None})
    batch = rewarded(build_batch(0))
    assert not learner.values(batch).any()
    first = learner.train(batch)
    for _ in range(30):
        last = learner.train(batch)
    assert first.explained_variance == pytest.approx(0.0, abs=1e-6)
    assert last.explained_variance is not None
    assert last.explained_variance > 0.5
    assert last.value_loss is not None
    assert first.value_loss is not None
    assert last.value_loss < first.value_loss / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_step_is_the_same_for_any_split(build_learner: BuildLearner, build_batch: BuildBatch, dtype: str) -> None:
    figures, weights = [], []
    for max_tokens in (8192, 12):
        learner = build_learner(type="ppo", max_tokens=max_tokens, dtype=dtype, critic={"learning_rate": 1e-2})
        for step in range(3):
            metrics = learner.train(rewarded(build_batch(step), step))
        figures.append(metrics)
        weights.append(critic_of(learner))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert figures[0].value_loss == pytest.approx(figures[1].value_loss, rel=tolerance)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=tolerance)


def test_only_the_critic_is_trained_first_and_then_the_policys_schedule_begins(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    learner = build_learner(type="ppo", critic_only_steps=2, entropy_coefficient=0.1, entropy_target=100.0)
    policy, critic = weights_of(learner), critic_of(learner)
    for step in range(2):
        assert learner.train(rewarded(build_batch(step))).lr == 0.0
    assert all(torch.equal(weight, policy[name]) for name, weight in weights_of(learner).items())
    assert any(not torch.equal(weight, critic[name]) for name, weight in critic_of(learner).items())
    metrics = learner.train(rewarded(build_batch(2)))
    assert metrics.lr == 1e-2 / 2  # the first of its two warm-up steps
    assert metrics.entropy_coefficient == 0.1  # nothing has moved it meanwhile
    assert any(not torch.equal(weight, policy[name]) for name, weight in weights_of(learner).items())


def test_a_resume_continues_with_the_critic(
    build_learner: BuildLearner, build_batch: BuildBatch, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    keys: dict[str, Any] = {"type": "ppo", "critic": {"learning_rate": 1e-2}, "mini_batches": 2}
    learner = build_learner(**keys)
    for step in range(2):
        learner.train(rewarded(build_batch(step)))
    path = save_checkpoint(tmp_path, learner, tokenizer, CheckpointMetadata(step=2))
    resumed = build_learner(**keys)
    load_checkpoint(path, resumed)
    for step in range(2, 4):
        assert learner.train(rewarded(build_batch(step))) == resumed.train(rewarded(build_batch(step)))
    expected = critic_of(learner)
    assert all(torch.equal(weight, expected[name]) for name, weight in critic_of(resumed).items())


def test_a_checkpoint_without_a_critic_is_refused_before_anything_is_loaded(
    build_learner: BuildLearner, build_batch: BuildBatch, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    learner.train(build_batch(0))
    path = save_checkpoint(tmp_path, learner, tokenizer, CheckpointMetadata(step=1))
    other = build_learner(type="ppo")
    before = weights_of(other)
    with pytest.raises(FailedPreconditionError, match=r"it has no critic.*as model\.path"):
        load_checkpoint(path, other)
    assert other.step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(other).items())


def test_a_critic_of_another_model_is_refused_before_anything_is_loaded(
    build_learner: BuildLearner, build_batch: BuildBatch, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner(type="ppo", dtype="bfloat16")
    learner.train(rewarded(build_batch(0)))
    path = save_checkpoint(tmp_path, learner, tokenizer, CheckpointMetadata(step=1))
    other = build_learner(type="ppo", dtype="bfloat16")
    assert other.critic
    other.critic._model.float()
    before = weights_of(other)
    with pytest.raises(FailedPreconditionError, match=r"critic\.weight\..* is torch.bfloat16"):
        load_checkpoint(path, other)
    assert other.step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(other).items())


def test_a_batch_without_rewards_or_values_is_refused(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    learner = build_learner(type="ppo")
    with pytest.raises(InvalidArgumentError, match=r"columns\[rewards\]"):
        learner.check_train_batch(build_batch(0))
    with pytest.raises(InvalidArgumentError, match=r"columns\[rewards\]"):
        learner.forward_backward(build_batch(0))
    own = rewarded(build_batch(0))
    with pytest.raises(InvalidArgumentError, match=r"columns\[values\]: .* another name"):
        learner.check_train_batch(replace(own, columns={**own.columns, VALUES: own.advantages_N}))
    with pytest.raises(InvalidArgumentError, match=r"not with algorithm\.type ppo"):
        learner.forward_backward(own, denominator=9)
    with pytest.raises(InvalidArgumentError, match=r"not with algorithm\.type ppo"):
        learner.forward_backward(own, AlgorithmSpec())


def test_the_verbs_of_a_step_make_the_step(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    by_verbs, whole = (build_learner(type="ppo", critic={"learning_rate": 1e-2}) for _ in range(2))
    for step in range(2):
        by_verbs.forward_backward(rewarded(build_batch(step)))
        by_verbs.optimizer_step()
        whole.train(rewarded(build_batch(step)))
    expected = weights_of(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(by_verbs).items())


def test_a_gradient_of_the_critic_that_is_not_finite_changes_nothing(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    learner = build_learner(type="ppo")
    policy, critic = weights_of(learner), critic_of(learner)
    batch = rewarded(build_batch(0))
    huge_N = np.where(batch.loss_mask_N, np.float32(3e38), np.float32(0))
    learner.forward_backward(replace(batch, columns={VALUES: np.zeros_like(huge_N), RETURNS: huge_N}))
    with pytest.raises(TrainingFailedError, match="gradient norm of the critic is"):
        learner.update()
    learner.train(rewarded(build_batch(1)))
    assert all(
        bool(weight.isfinite().all()) for weight in (*weights_of(learner).values(), *critic_of(learner).values())
    )
    assert policy.keys() == weights_of(learner).keys()
    assert critic.keys() == critic_of(learner).keys()


def test_a_batch_without_a_trained_token_is_a_step(build_learner: BuildLearner) -> None:
    metrics = build_learner(type="ppo").train(TrainBatch.pack([]))
    assert (metrics.token_count, metrics.explained_variance) == (0, None)
