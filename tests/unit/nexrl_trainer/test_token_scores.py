"""Log-probabilities and entropies in chunks: those of the plain way, in the memory of one chunk."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch
from nexrl_trainer import token_scores as scores_module
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.head import Head, linear
from nexrl_trainer.losses import LOSSES, token_entropy
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.token_scores import token_scores
from tests.support.batches import group_of_samples
from tests.support.families import FAMILIES_BY_TYPE, VOCABULARY_SIZE
from tests.support.memory import peak_allocated_bytes

# Chunks change the order in which float32 numbers are added up, and nothing else. Largest difference measured: 3e-7 of
# a log-probability and of the largest gradient of a model.
TOLERANCE = 5e-6
BFLOAT16_TOLERANCE = 2.0**-8
"""One rounding of a gradient to 16 bits, relative to the largest."""
CHUNK_ROWS, BLOCK_ROWS = 5, 2
KINDS = {
    "tied": "llama",
    "query bias": "qwen2",
    "query norm": "qwen3",
    "soft cap": "gemma2",
    "own weight": "gpt_neox",
    "sliding window": "mistral",
    "experts": "mixtral",
    "recurrent": "qwen3_5_text",
    "bias": "phi",
    "scale": "granite",
    "logit scale": "cohere",
    "multiplier": "falcon_h1",
    "scaled input": "minicpm3",
    "text of a larger model": "gemma3",
    "no body of its own": "llama4_text",
}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Cuts logits into chunks of a few rows, from now on."""

    def cut() -> None:
        monkeypatch.setattr(scores_module, "CHUNK_BYTES", 4 * VOCABULARY_SIZE * CHUNK_ROWS)
        monkeypatch.setattr(scores_module, "BLOCK_BYTES", 4 * VOCABULARY_SIZE * BLOCK_ROWS)

    return cut


def trained(model: PreTrainedModel, batch: TrainBatch, **algorithm: Any) -> tuple[dict[str, float], Tensor, Any]:
    """Return metrics, gradient and log-probabilities of one batch."""
    forward = ForwardSettings(temperature=0.7, top_k=20, top_p=0.9)
    learner = Learner(model, LearnerSettings(AlgorithmSpec.model_validate(algorithm), 10, forward))
    metrics = learner.forward_backward(batch)
    masters = learner.optimizer._masters.values()
    gradient = torch.cat([master.grad.flatten() for master in masters if master.grad is not None])
    return asdict(metrics), gradient, learner.forward(batch)


def assert_same(found: tuple[dict[str, float], Tensor, Any], expected: tuple[dict[str, float], Tensor, Any]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE, abs=TOLERANCE)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=TOLERANCE * float(expected[1].abs().max()))
    np.testing.assert_allclose(found[2], expected[2], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing_whatever_a_model_does_around_its_head(kind: str, cut: Callable[[], None]) -> None:
    family, batch = FAMILIES_BY_TYPE[KINDS[kind]], group_of_samples(seed=1)
    expected = trained(family.build(), batch, loss="reinforce", entropy_coefficient=0.1)
    cut()
    assert_same(trained(family.build(), batch, loss="reinforce", entropy_coefficient=0.1), expected)


def test_chunks_of_a_16_bit_model_are_in_float32(cut: Callable[[], None]) -> None:
    family, batch = FAMILIES_BY_TYPE["llama"], group_of_samples(seed=1)
    expected = trained(family.build(torch.bfloat16), batch, loss="reinforce", entropy_coefficient=0.1)
    cut()
    found = trained(family.build(torch.bfloat16), batch, loss="reinforce", entropy_coefficient=0.1)
    np.testing.assert_allclose(found[2], expected[2], rtol=0, atol=TOLERANCE)
    largest = float(expected[1].abs().max())
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=BFLOAT16_TOLERANCE * largest)


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_chunks_change_no_loss(loss: str, entropy_coefficient: float, cut: Callable[[], None]) -> None:
    family, batch = FAMILIES_BY_TYPE["llama"], group_of_samples(seed=2)
    algorithm = {"loss": loss, "entropy_coefficient": entropy_coefficient, "kl_coefficient": 0.1}
    expected = trained(family.build(), batch, **algorithm)
    cut()
    assert_same(trained(family.build(), batch, **algorithm), expected)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
def test_entropy_has_a_graph_only_if_it_is_in_the_loss(
    entropy_coefficient: float, is_cut: bool, cut: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[bool] = []

    def noting(logprobs_RV: Tensor) -> Tensor:
        graphs.append(torch.is_grad_enabled())
        return token_entropy(logprobs_RV)

    monkeypatch.setattr(scores_module, "token_entropy", noting)
    if is_cut:
        cut()
    algorithm = {"loss": "reinforce", "entropy_coefficient": entropy_coefficient}
    trained(FAMILIES_BY_TYPE["llama"].build(), group_of_samples(seed=1), **algorithm)
    assert any(graphs) == (entropy_coefficient > 0)


def test_logits_of_one_chunk_are_kept_and_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_module, "BLOCK_BYTES", 4 * VOCABULARY_SIZE * BLOCK_ROWS)
    products: list[int] = []

    def counting(hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        products.append(len(hidden_RH))
        return linear(hidden_RH, weight_VH, bias_V)

    monkeypatch.setattr(scores_module, "linear", counting)
    trained(FAMILIES_BY_TYPE["llama"].build(), group_of_samples(seed=1), loss="reinforce")
    assert products == [17, 17]  # of the training pass, and of `forward`


@pytest.mark.parametrize("is_trained", [True, False])
def test_memory_of_the_logits_is_that_of_one_chunk(is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary_size, chunk_bytes = 1024, 16_384, 2**23  # 64 MiB of logits
    monkeypatch.setattr(scores_module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(scores_module, "BLOCK_BYTES", chunk_bytes // 32)
    head, token_ids_P = nn.Linear(4, vocabulary_size), torch.arange(tokens)
    hidden_PH = torch.randn(tokens, 4, requires_grad=True)

    def score() -> None:
        with torch.set_grad_enabled(is_trained):
            scores = token_scores(Head(head, hidden_PH, lambda logits_RV: logits_RV), token_ids_P, distribution)
            if is_trained:
                (scores.logprobs_P.sum() - 0.1 * scores.entropy_P.sum()).backward()

    def distribution(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
        return logits_RV.log_softmax(-1)

    gradient_bytes = 4 * (sum(weight.numel() for weight in head.parameters()) + hidden_PH.numel())
    assert peak_allocated_bytes(score) <= gradient_bytes + 1.2 * chunk_bytes
