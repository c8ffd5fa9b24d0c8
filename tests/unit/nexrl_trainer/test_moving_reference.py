"""A reference model that follows the policy: what it is after each step, and that a resume continues with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from nexrl.errors import InvalidArgumentError
from nexrl.models import iter_weights
from nexrl.train_batch import TrainBatch
from nexrl_trainer.checkpoint import CheckpointMetadata, load_checkpoint
from nexrl_trainer.step import Learner
from tests.support.checkpoints import save_checkpoint

BuildLearner = Callable[..., Learner]
BuildBatch = Callable[..., TrainBatch]
FOLLOWS: list[dict[str, Any]] = [{"type": "refreshed", "every_steps": 2}, {"type": "average", "decay": 0.75}]


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iter_weights(learner.model)}


def reference_of(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner._moving_reference
    tensors = learner._moving_reference.tensors().items()
    return {name.removeprefix("reference."): tensor.clone() for name, tensor in tensors}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_becomes_the_policy_every_few_steps(
    build_learner: BuildLearner, build_batch: BuildBatch, dtype: str
) -> None:
    learner = build_learner(kl_coefficient=0.1, reference={"type": "refreshed", "every_steps": 2}, dtype=dtype)
    expected = weights_of(learner)
    for step in range(5):
        for name, weight in reference_of(learner).items():
            torch.testing.assert_close(weight, expected[name].float(), rtol=0, atol=0)
        learner.train(build_batch(step))
        if learner.step % 2 == 0:
            expected = weights_of(learner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moving_average_keeps_a_share_of_itself(
    build_learner: BuildLearner, build_batch: BuildBatch, dtype: str
) -> None:
    learner = build_learner(kl_coefficient=0.1, reference={"type": "average", "decay": 0.75}, dtype=dtype)
    expected = {name: weight.double().numpy() for name, weight in weights_of(learner).items()}
    for step in range(4):
        learner.train(build_batch(step))
        expected = {n: 0.75 * expected[n] + 0.25 * each.double().numpy() for n, each in weights_of(learner).items()}
    for name, weight in reference_of(learner).items():
        np.testing.assert_allclose(weight, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("follows", FOLLOWS)
def test_the_penalty_compares_with_it_and_not_with_what_the_batch_says(
    build_learner: BuildLearner, build_batch: BuildBatch, follows: dict[str, Any]
) -> None:
    learner = build_learner(kl_coefficient=0.1, reference=follows)
    metrics = [learner.train(build_batch(step)) for step in range(4)]
    assert metrics[0].reference_kl == pytest.approx(0, abs=1e-9)
    assert metrics[1].reference_kl > 1e-6
    is_refreshed = follows["type"] == "refreshed"
    assert metrics[2].reference_kl == pytest.approx(0, abs=1e-9) if is_refreshed else metrics[2].reference_kl > 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_computing_with_it_leaves_the_policy_as_it_is(
    build_learner: BuildLearner, build_batch: BuildBatch, dtype: str
) -> None:
    learner = build_learner(kl_coefficient=0.1, reference={"type": "average", "decay": 0.5}, dtype=dtype)
    learner.train(build_batch(0))
    before, batch = weights_of(learner), build_batch(1)
    reference_N, policy_N = learner.forward_reference(batch), learner.forward(batch)
    assert np.abs(reference_N - policy_N).max() > 1e-4
    for name, weight in weights_of(learner).items():
        assert torch.equal(weight, before[name])


def test_dpo_compares_with_it(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    pair_B = np.array([1, -1, 2, -2, 3, -3])
    batch = replace(build_batch(seed=1), columns={"pair": pair_B}, reference_logprobs_N=None)
    learner = build_learner(loss="dpo", reference={"type": "refreshed", "every_steps": 1})
    assert [learner.train(batch).loss for _ in range(3)] == pytest.approx([np.log(2)] * 3, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("follows", FOLLOWS)
def test_a_resumed_run_continues_with_it_bit_for_bit(
    tmp_path: Path,
    build_learner: BuildLearner,
    build_batch: BuildBatch,
    tokenizer: PreTrainedTokenizerBase,
    follows: dict[str, Any],
    dtype: str,
) -> None:
    algorithm = {"kl_coefficient": 1.0, "reference": follows, "dtype": dtype}
    whole, resumed = build_learner(**algorithm), build_learner(**algorithm)
    for step in range(3):
        whole.train(build_batch(step))
    path = save_checkpoint(tmp_path, whole, tokenizer, CheckpointMetadata(step=3))
    resumed.train(build_batch(99))
    load_checkpoint(path, resumed)
    for step in range(3, 6):
        assert resumed.train(build_batch(step)) == whole.train(build_batch(step))
    for name, weight in reference_of(whole).items():
        assert torch.equal(weight, reference_of(resumed)[name])
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, weights_of(resumed)[name])


def test_after_a_frozen_one_it_begins_as_the_initial_model(
    tmp_path: Path, build_learner: BuildLearner, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    frozen, follower = (
        build_learner(kl_coefficient=0.1),
        build_learner(kl_coefficient=0.1, reference={"type": "average", "decay": 0.5}),
    )
    initial = weights_of(follower)
    frozen.train(build_batch(0))
    load_checkpoint(save_checkpoint(tmp_path, frozen, tokenizer, CheckpointMetadata(step=1)), follower)
    for name, weight in reference_of(follower).items():
        assert torch.equal(weight, initial[name])


def test_a_forward_backward_of_a_client_must_bring_its_own(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    learner = build_learner(kl_coefficient=0.1, reference={"type": "average", "decay": 0.5})
    with pytest.raises(InvalidArgumentError, match="reference_logprobs_N"):
        learner.forward_backward(replace(build_batch(0), reference_logprobs_N=None))
