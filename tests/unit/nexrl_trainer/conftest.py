"""A learner small enough for any test, and batches for it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from nexrl.models import build_model, build_tokenizer
from nexrl.spec.experiment import AlgorithmSpec, ModelSpec, ScratchModelSpec
from nexrl_trainer.batching import TrainBatch, TrainSequence
from nexrl_trainer.step import Learner, LearnerSettings

_SCRATCH = ScratchModelSpec(
    alphabet="0123456789=", hidden_size=16, intermediate_size=32, layers=2, heads=2, max_positions=32
)
MODEL = ModelSpec(scratch=_SCRATCH)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def build_learner() -> Callable[..., Learner]:
    """Builds learners that are equal for equal arguments; further keywords go to the algorithm."""

    def build(*, max_tokens: int = 8192, temperature: float = 1.0, dtype: str = "float32", **algorithm: Any) -> Learner:
        settings = AlgorithmSpec(**{"learning_rate": 1e-2, "warmup_steps": 2, **algorithm})
        model = build_model(MODEL.model_copy(update={"dtype": dtype}), seed=0)
        return Learner(model, LearnerSettings(settings, 10, temperature, max_tokens))

    return build


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(MODEL)


@pytest.fixture
def build_batch() -> Callable[..., TrainBatch]:
    """Builds a batch of sequences of several lengths from a seed; loss masks may have holes, as in multi-turn use."""

    def build(seed: int, sequences: int = 6) -> TrainBatch:
        random = np.random.default_rng(seed)
        return TrainBatch.pack([_sequence(random) for _ in range(sequences)])

    return build


def _sequence(random: np.random.Generator) -> TrainSequence:
    length = int(random.integers(3, 12))
    mask = random.random(length) < 0.6
    mask[0], mask[1] = False, True
    return TrainSequence(
        token_ids=random.integers(4, 15, length),
        loss_mask=mask,
        rollout_logprobs=-3 * random.random(length),
        advantage=float(random.normal()),
        reference_logprobs=-3 * random.random(length),
    )
