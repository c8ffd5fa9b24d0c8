"""Coefficients of KL penalty and entropy bonus that follow a target."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from nexrl.errors import TrainingFailedError
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch
from nexrl_trainer.checkpoint import CheckpointMetadata, load_checkpoint
from nexrl_trainer.coefficients import Coefficients
from nexrl_trainer.step import Learner
from nexrl_trainer.step_metrics import LossMetrics, no_loss
from tests.support.checkpoints import save_checkpoint

BuildLearner = Callable[..., Learner]
BuildBatch = Callable[..., TrainBatch]


def measured(kl: float = 0.0, entropy: float = 0.0, tokens: int = 10) -> LossMetrics:
    return replace(no_loss(1), reference_kl=kl, entropy=entropy, token_count=tokens)


def after(coefficients: Coefficients, *steps: LossMetrics) -> list[tuple[float, float]]:
    """The coefficients after each step of one update."""
    found = []
    for each in steps:
        coefficients.observe(each)
        coefficients.keep()
        coefficients.end_step()
        found.append((coefficients.kl, coefficients.entropy))
    return found


def test_the_kl_coefficient_follows_the_controller_of_its_paper() -> None:
    values = [0.5, 2.0, 2.1, 1.9, 9.0]
    expected = 0.05 * np.cumprod(1 + 0.1 * np.clip(np.array(values) / 2.0 - 1, -0.2, 0.2))  # arXiv 1909.08593, 2.2
    found = after(Coefficients(AlgorithmSpec(kl_coefficient=0.05, kl_target=2.0)), *(measured(kl=v) for v in values))
    np.testing.assert_allclose([kl for kl, _ in found], expected, rtol=1e-12)


def test_the_entropy_bonus_rises_below_the_target_and_is_off_above_it() -> None:
    entropies = [1.0, 1.0, 3.0, 1.0, 2.0]
    found = after(Coefficients(AlgorithmSpec(entropy_target=2.0)), *(measured(entropy=e) for e in entropies))
    assert [entropy for _, entropy in found] == pytest.approx([0.005, 0.01, 0, 0.01, 0.01])


def test_without_a_target_the_coefficients_stay() -> None:
    fixed = Coefficients(AlgorithmSpec(kl_coefficient=0.1, entropy_coefficient=0.2))
    assert after(fixed, measured(9.0, 9.0), measured(0.0, 0.0)) == [(0.1, 0.2)] * 2
    assert fixed.tensors() == {}


def test_both_stay_within_the_limits_of_their_keys() -> None:
    algorithm = AlgorithmSpec(kl_coefficient=99.9, kl_target=1.0, entropy_coefficient=9.999, entropy_target=1.0)
    assert after(Coefficients(algorithm), measured(9.0, 0.0)) == [(100.0, 10.0)]
    low = Coefficients(AlgorithmSpec(entropy_target=1.0))
    assert after(low, measured(entropy=2.0), measured(entropy=0.0))[-1][1] == pytest.approx(0.005)


def test_a_step_counts_its_tokens_and_none_that_was_not_used() -> None:
    coefficients = Coefficients(AlgorithmSpec(kl_coefficient=1.0, kl_target=1.0))
    coefficients.observe(measured(kl=0.9, tokens=30))
    coefficients.observe(measured(kl=1.3, tokens=10))
    coefficients.keep()
    coefficients.observe(measured(kl=500.0))
    coefficients.drop()
    coefficients.end_step()
    assert coefficients.kl == pytest.approx(1.0)
    assert after(coefficients, measured(kl=7.0, tokens=0)) == [(coefficients.kl, 0.0)]


def test_a_step_uses_the_coefficients_that_the_steps_before_have_chosen(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    batch = build_batch(seed=6)
    learner = build_learner(kl_coefficient=1.0, kl_target=1e-6, entropy_target=100.0)
    first, second = learner.train(batch), learner.train(batch)
    assert (first.kl_coefficient, first.entropy_coefficient) == (1.0, 0.0)
    assert (second.kl_coefficient, second.entropy_coefficient) == pytest.approx((1.02, 0.005))
    fixed = build_learner(kl_coefficient=1.0)
    fixed.train(batch)
    terms = second.loss - fixed.train(batch).loss
    assert terms == pytest.approx(0.02 * second.reference_kl - 0.005 * second.entropy, rel=1e-3)


def test_a_step_that_failed_moves_no_coefficient(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    learner, batch = build_learner(kl_coefficient=1.0, kl_target=1e-6), build_batch(seed=6)
    before = learner.train(batch)
    huge = replace(batch, advantages_N=np.full_like(batch.advantages_N, 3e38))
    with pytest.raises(TrainingFailedError):
        learner.train(huge)
    learner.train(batch.select(np.zeros(len(batch.lengths_B), np.bool_)))
    assert learner.train(batch).kl_coefficient == pytest.approx(before.kl_coefficient * 1.02)


def test_a_resumed_run_continues_with_its_coefficients(
    tmp_path: Path, build_learner: BuildLearner, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    targets = {"kl_coefficient": 1.0, "kl_target": 0.3, "entropy_target": 2.7}
    whole, resumed = build_learner(**targets), build_learner(**targets)
    for step in range(3):
        whole.train(build_batch(step))
    path = save_checkpoint(tmp_path, whole, tokenizer, CheckpointMetadata(step=3))
    resumed.train(build_batch(99))
    load_checkpoint(path, resumed)
    for step in range(3, 6):
        expected, found = whole.train(build_batch(step)), resumed.train(build_batch(step))
        assert found == expected
        assert expected.kl_coefficient != 1.0
