"""The built-in engine on a GPU serves the log-probabilities that the trainer computes there."""

import numpy as np
import torch

from nexrl.models import build_empty_model, iter_weights
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.requests import GenerationRequest, GenerationResult
from nexrl_trainer.ranks import Ranks
from tests.support.gpu import needs_gpu
from tests.support.rank_process import TEMPERATURE, RankCase, on_device

pytestmark = [*needs_gpu]

DEVICE = "cuda"
MAX_DIFFERENCE = 1e-4
"""Of log-probabilities in float32. Not measured yet; of the engine on a CPU, 1e-5."""


def test_the_engine_serves_the_log_probabilities_of_the_trainer() -> None:
    case = RankCase([4], {"loss": "ppo_clip"})
    learner = case.learner(Ranks(device=torch.device(DEVICE)))
    learner.train(case.batches()[0])
    engine = Engine(
        on_device(build_empty_model(case.source), DEVICE), eos_token_ids=[], limits=Limits(max_tokens_per_row=64)
    )
    engine.load_weights({name: tensor.cpu() for name, tensor in iter_weights(learner.model)}, version=1)
    for number in range(4):
        prompt = tuple(range(4, 8 + number))
        seeds = (number, number + 100)
        engine.submit(GenerationRequest(str(number), prompt, 16, n=2, temperature=TEMPERATURE, seeds=seeds))
    results: list[GenerationResult] = []
    while not engine.is_idle:
        results += engine.step()
    batch = batch_of(results)
    assert batch.loss_mask_N.sum() == 4 * 2 * 16
    np.testing.assert_allclose(
        learner.forward(batch), np.where(batch.loss_mask_N, batch.rollout_logprobs_N, 0), rtol=0, atol=MAX_DIFFERENCE
    )


def batch_of(results: list[GenerationResult]) -> TrainBatch:
    sequences = []
    for result in results:
        for completion in result.completions:
            token_ids = [*result.prompt_ids, *completion.token_ids]
            before = len(result.prompt_ids)
            mask = [False] * before + [True] * len(completion.token_ids)
            sequences.append(TrainSequence(token_ids, mask, [*[0.0] * before, *completion.logprobs], 1.0))
    return TrainBatch.pack(sequences)
