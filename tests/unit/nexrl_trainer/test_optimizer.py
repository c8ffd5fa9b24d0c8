"""The optimizer: schedule, accumulation, epsilon and weight decay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.models import iter_weights
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.optimizer import hidden_matrices, learning_rate
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.tensor_slices import SavedTensors
from tests.support.families import FAMILIES_BY_TYPE

BuildLearner = Callable[..., Learner]
SAMPLE = TrainSequence([1, 5, 6], [False, True, True], [0.0, 0.0, 0.0], 1.0)
WITHOUT_GRADIENT = TrainBatch.pack([TrainSequence([1, 5, 6], [False, True, True], [0.0, 0.0, 0.0], 0.0)])


def test_learning_rate_rises_then_falls_to_its_floor_at_the_last_update() -> None:
    algorithm = AlgorithmSpec(learning_rate=1.0, warmup_steps=2, final_learning_rate_ratio=0.1)
    rates = [learning_rate(step, algorithm, total_steps=13) for step in range(15)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[11] > 0.15
    assert rates[12:] == pytest.approx([0.1, 0.1, 0.1])


def test_learning_rate_is_stable_until_the_last_steps_if_these_are_given() -> None:
    algorithm = AlgorithmSpec(learning_rate=1.0, warmup_steps=2, final_learning_rate_ratio=0.0, decay_steps=4)
    rates = [learning_rate(step, algorithm, total_steps=13) for step in range(13)]
    assert rates[1:9] == [1.0] * 8
    assert rates[9:] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_a_cosine_falls_slowly_at_both_ends() -> None:
    algorithm = AlgorithmSpec(learning_rate=1.0, final_learning_rate_ratio=0.1, learning_rate_decay="cosine")
    rates = [learning_rate(step, algorithm, total_steps=5) for step in range(6)]
    expected = [0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2 for share in (0, 0.25, 0.5, 0.75, 1, 1)]
    assert rates == pytest.approx(expected)


def test_without_a_last_update_the_rate_stays_after_the_warm_up() -> None:
    algorithm = AlgorithmSpec(learning_rate=1.0, warmup_steps=2, final_learning_rate_ratio=0.1)
    assert [learning_rate(step, algorithm, total_steps=0) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("total_steps", [1, 3, 4, 20])
def test_the_last_update_has_the_final_rate_however_many_there_are(total_steps: int) -> None:
    algorithm = AlgorithmSpec(learning_rate=1.0, final_learning_rate_ratio=0.1)
    assert learning_rate(total_steps - 1, algorithm, total_steps) == pytest.approx(0.1)


def test_gradients_of_many_micro_batches_of_a_16_bit_model_add_up(build_learner: BuildLearner) -> None:
    count = 512
    one, many = (build_learner(dtype="bfloat16", max_tokens=3, loss="reinforce") for _ in range(2))
    one.forward_backward(TrainBatch.pack([SAMPLE]), denominator=2)
    many.forward_backward(TrainBatch.pack([SAMPLE] * count), denominator=2)
    assert many.optimizer_step().grad_norm == pytest.approx(count * one.optimizer_step().grad_norm, rel=1e-4)


def test_eps_bounds_the_update_of_small_gradients(build_learner: BuildLearner) -> None:
    sizes = []
    for eps in (1e-8, 1.0):
        learner = build_learner(eps=eps, learning_rate=0.01, warmup_steps=0, loss="reinforce")
        before = {name: tensor.clone() for name, tensor in iter_weights(learner.model)}
        gradient = learner.train(TrainBatch.pack([SAMPLE])).grad_norm
        sizes.append(max(float((tensor - before[name]).abs().max()) for name, tensor in iter_weights(learner.model)))
    assert sizes[0] == pytest.approx(0.01, rel=1e-3)  # the first update of AdamW is the rate, whatever the gradient
    assert sizes[1] < 0.01 * min(gradient, 1.0)


def test_a_larger_gradient_is_scaled_down_to_the_clip(build_learner: BuildLearner) -> None:
    learner = build_learner(gradient_clip=1e-3, loss="reinforce")
    learner.forward_backward(TrainBatch.pack([SAMPLE]))
    assert learner.optimizer.clip_gradient() > 1e-3
    assert learner.optimizer.clip_gradient() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("decays", [True, False])
def test_weight_decay_of_norms_and_biases_is_a_choice(decays: bool) -> None:
    model = FAMILIES_BY_TYPE["gpt2"].build()
    with torch.no_grad():
        for _, weight in iter_weights(model):
            weight.fill_(0.5)  # no weight is 0, which cannot decay
    algorithm = AlgorithmSpec(weight_decay=0.5, decay_norms_and_biases=decays, learning_rate=0.01)
    Learner(model, LearnerSettings(algorithm, total_steps=10)).train(WITHOUT_GRADIENT)
    after = {name: float(weight.mean()) for name, weight in iter_weights(model) if weight.ndim < 2}
    assert {name.rpartition(".")[2] for name in after} == {"weight", "bias"}
    vectors = 0.5 * (1 - 0.01 * 0.5 if decays else 1.0)
    assert after == pytest.approx(dict.fromkeys(after, vectors))
    matrices = [float(weight.mean()) for _, weight in iter_weights(model) if weight.ndim >= 2]
    assert matrices == pytest.approx([0.5 * (1 - 0.01 * 0.5)] * len(matrices))


def test_muon_updates_the_matrices_of_the_layers_by_scaled_orthogonal_ones_and_adamw_the_rest(
    build_learner: BuildLearner,
) -> None:
    settings = {"learning_rate": 0.01, "warmup_steps": 0, "loss": "reinforce"}
    muon, adamw = build_learner(optimizer="muon", **settings), build_learner(**settings)
    before = {name: tensor.clone() for name, tensor in iter_weights(muon.model)}
    for learner in (muon, adamw):
        learner.train(TrainBatch.pack([SAMPLE]))
    of_adamw = dict(iter_weights(adamw.model))
    for name, tensor in iter_weights(muon.model):
        change = tensor - before[name]
        is_hidden = "_proj." in name
        assert torch.equal(tensor, of_adamw[name]) != is_hidden, name
        if is_hidden:  # arXiv 2502.16982: rate * 0.2 * sqrt(longer side) * U V', of which five iterations come near
            norm = torch.linalg.matrix_norm(change, ord=2) / (0.01 * 0.2 * max(change.shape) ** 0.5)
            assert 0.5 < norm < 1.3


def test_muon_is_torchs_on_float32_masters_and_decays_as_adamw(build_learner: BuildLearner) -> None:
    settings = {"learning_rate": 0.01, "warmup_steps": 0, "loss": "reinforce", "weight_decay": 0.5}
    learner, name = build_learner(optimizer="muon", **settings), "model.layers.0.mlp.up_proj.weight"
    weight = dict(learner.model.named_parameters())[name]
    own = weight.detach().clone().requires_grad_()
    torchs = torch.optim.Muon([own], lr=0.01, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        learner.forward_backward(TrainBatch.pack([SAMPLE]))
        learner.optimizer.clip_gradient()
        own.grad = None if weight.grad is None else weight.grad.clone()
        torchs.step()
        learner.optimizer.update(0.01)
        assert torch.equal(weight, own)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_muon_leaves_embeddings_head_norms_and_biases_to_adamw(family: str) -> None:
    model = FAMILIES_BY_TYPE[family].build()
    hidden, weights = hidden_matrices(model), dict(model.named_parameters())
    assert hidden
    assert all(weights[name].ndim == 2 for name in hidden)
    assert not [name for name in hidden if any(part in name for part in ("wte", "wpe", "embed", "lm_head", "norm"))]


@pytest.mark.parametrize(
    "settings",
    [{"weight_decay": 0.5, "decay_norms_and_biases": False}, {"optimizer": "muon", "decay_norms_and_biases": False}],
)
def test_a_run_with_two_groups_of_weights_resumes(build_learner: BuildLearner, settings: dict[str, Any]) -> None:
    settings = {**settings, "dtype": "bfloat16"}
    whole, resumed = build_learner(**settings), build_learner(**settings)
    whole.train(TrainBatch.pack([SAMPLE]))
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.optimizer.load_tensors(SavedTensors.of(Path("whole"), whole.optimizer.tensors()))
    resumed.step = whole.step
    assert whole.train(TrainBatch.pack([SAMPLE])) == resumed.train(TrainBatch.pack([SAMPLE]))
    assert np.all([torch.equal(t, resumed.optimizer.tensors()[n]) for n, t in whole.optimizer.tensors().items()])


def test_weights_that_another_optimizer_has_updated_begin_without_moments(build_learner: BuildLearner) -> None:
    before, after = build_learner(), build_learner(optimizer="muon")
    before.train(TrainBatch.pack([SAMPLE]))
    after.optimizer.load_tensors(SavedTensors.of(Path("before"), before.optimizer.tensors()))
    kept = {name.split(".", 1)[1] for name in after.optimizer.tensors()}
    assert kept == set(dict(after.model.named_parameters())) - hidden_matrices(after.model)
