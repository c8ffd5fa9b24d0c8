"""A learner small enough for any test, and batches for it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nexrl.models import build_model
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.model import ScratchModel, ScratchModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.critic import give_value_head
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.step import Learner, LearnerSettings

_SCRATCH = ScratchModelSpec(
    alphabet="0123456789=", hidden_size=16, intermediate_size=32, layers=2, heads=2, max_positions=32
)
MODEL = ScratchModel(scratch=_SCRATCH)


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
        critic = partial(_critic_model, dtype) if settings.type == "ppo" else None
        described = LearnerSettings(settings, 10, ForwardSettings(temperature, max_tokens))
        return Learner(model, described, critic_model=critic)

    return build


def _critic_model(dtype: str) -> PreTrainedModel:
    model = build_model(MODEL.model_copy(update={"dtype": dtype}), seed=1)
    give_value_head(model)
    return model


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(MODEL)


@pytest.fixture
def build_batch() -> Callable[..., TrainBatch]:
    """Builds a batch of samples of two tasks from a seed; loss masks may have holes, as in multi-turn use."""

    def build(seed: int, sequences: int = 6) -> TrainBatch:
        random = np.random.default_rng(seed)
        contexts = [random.integers(4, 15, int(random.integers(1, 5))) for _ in range(2)]
        return TrainBatch.pack([_sequence(random, contexts[number % 2]) for number in range(sequences)])

    return build


def _sequence(random: np.random.Generator, context: NDArray[np.int64]) -> TrainSequence:
    own = int(random.integers(1, 9))
    mask = np.concatenate([np.zeros(len(context), bool), [True], random.random(own - 1) < 0.6])
    return TrainSequence(
        token_ids=np.concatenate([context, random.integers(4, 15, own)]),
        loss_mask=mask,
        rollout_logprobs=-3 * random.random(len(mask)),
        advantage=float(random.normal()),
        reference_logprobs=-3 * random.random(len(mask)),
    )
