"""Top-k and top-p: the trainer's truncated distribution is the one that the engine draws from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexrl.models import build_model
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.model import ModelSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.truncation import truncated_logits
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.requests import Completion, GenerationRequest
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.losses import token_entropy
from nexrl_trainer.step import Learner, LearnerSettings

MODEL = ModelSpec.model_validate(
    {"scratch": {"alphabet": "0123456789", "hiddenSize": 32, "layers": 2, "heads": 2, "maxPositions": 64}}
)
PROMPT = (1, 5, 6)


def reference(logits_V: NDArray[np.float32], token: int, top_p: float, top_k: int) -> NDArray[np.float64]:
    """The definition for one token, in plain NumPy: probabilities [V]."""
    scores = logits_V.astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    candidates = order[:top_k] if top_k else order
    mass = np.exp(scores[candidates] - scores.max())
    mass /= mass.sum()
    before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    kept = set(candidates[before < top_p].tolist()) if top_p < 1 else set(candidates.tolist())
    kept.add(token)
    probabilities = np.zeros(len(scores))
    chosen = sorted(kept)
    probabilities[chosen] = np.exp(scores[chosen] - scores.max())
    probabilities /= probabilities.sum()
    return probabilities


@settings(max_examples=100, deadline=None)
@given(
    top_p=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    rows=st.sampled_from([1, 3, 300]),  # 300: sorted in more than one part
    seed=st.integers(0, 10_000),
)
def test_probabilities_are_those_of_the_numpy_reference(top_p: float, top_k: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_PV = torch.randn(rows, 9, generator=generator) * 3
    token_ids_P = torch.randint(9, (rows,), generator=generator)
    truncated_PV = truncated_logits(logits_PV, token_ids_P, top_p=top_p, top_k=top_k)
    for row, probabilities_V in enumerate(truncated_PV.softmax(-1).numpy()):
        expected_V = reference(logits_PV[row].numpy(), int(token_ids_P[row]), top_p, top_k)
        np.testing.assert_allclose(probabilities_V, expected_V, atol=1e-5)


def test_without_truncation_the_logits_are_returned_as_they_are() -> None:
    logits_PV = torch.randn(2, 9)
    assert truncated_logits(logits_PV, torch.tensor([0, 1]), top_p=1.0, top_k=0) is logits_PV


def test_removed_tokens_get_no_gradient_and_entropy_stays_finite() -> None:
    logits_PV = torch.tensor([[3.0, 2.0, 1.0, -8.0]], requires_grad=True)
    logprobs_PV = truncated_logits(logits_PV, torch.tensor([3]), top_p=1.0, top_k=2).log_softmax(-1)
    (logprobs_PV[0, 3] + token_entropy(logprobs_PV).sum()).backward()
    assert logits_PV.grad is not None
    assert torch.isfinite(logits_PV.grad).all()
    assert logits_PV.grad[0, 2] == 0
    assert (logits_PV.grad[0, [0, 1, 3]] != 0).all()


def build_learner(**sampling: float) -> Learner:
    return Learner(build_model(MODEL, 3), LearnerSettings(AlgorithmSpec(), 10, ForwardSettings(**sampling)))  # type: ignore[arg-type]


def draw(learner: Learner, **sampling: float) -> tuple[Completion, ...]:
    """Completions of the learner's own weights, drawn by the built-in engine."""
    engine = Engine(build_model(MODEL, 4), eos_token_ids=(2,), limits=Limits(max_tokens_per_row=48))
    engine.load_weights(learner.model.state_dict(), version=0)
    engine.submit(GenerationRequest("r", PROMPT, max_new_tokens=40, n=8, **sampling))  # type: ignore[arg-type]
    results = []
    while not engine.is_idle:
        results += engine.step()
    return results[0].completions


def sequence(completion: Completion) -> TrainSequence:
    context = len(PROMPT)
    return TrainSequence(
        token_ids=np.array([*PROMPT, *completion.token_ids], np.int64),
        loss_mask=np.array([False] * context + [True] * len(completion.token_ids)),
        rollout_logprobs=np.array([0.0] * context + list(completion.logprobs), np.float32),
        advantage=1.0,
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.6, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.8, "top_k": 6},
    ],
)
def test_of_equal_weights_the_trainer_computes_the_log_probabilities_that_the_engine_recorded(
    sampling: dict[str, float],
) -> None:
    learner = build_learner(**sampling)
    completions = draw(learner, **sampling)
    batch = TrainBatch.pack([sequence(completion) for completion in completions])
    np.testing.assert_allclose(learner.forward(batch), batch.rollout_logprobs_N, atol=1e-4)
    assert learner.forward_backward(batch).ratio_max == pytest.approx(1.0, abs=1e-3)
    untruncated = build_learner(temperature=sampling["temperature"])
    assert untruncated.forward_backward(batch).ratio_min < 0.95
