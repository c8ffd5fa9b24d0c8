"""Every architecture family: its log-probabilities, its gradients and its checkpoints are right."""

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from nexrl.models import build_model
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.model import PathModel
from nexrl_trainer.checkpoint import CheckpointMetadata, load_checkpoint
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.model_files import (
    ranked_file,
    saved_weights,
    write_configuration,
    write_index,
    write_weights,
    writers,
)
from nexrl_trainer.step import Learner, LearnerSettings
from tests.support.batches import group_of_samples
from tests.support.checkpoints import save_checkpoint
from tests.support.families import FAMILIES, FAMILIES_BY_TYPE, Family, plain_logprobs

ALGORITHM = AlgorithmSpec(learning_rate=1e-2, loss="reinforce")
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


def learner_of(model: PreTrainedModel, max_tokens: int = 128) -> Learner:
    return Learner(model, LearnerSettings(ALGORITHM, 10, ForwardSettings(max_tokens_per_micro_batch=max_tokens)))


def gradient(learner: Learner) -> Tensor:
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


@each_family
def test_logprobs_are_the_models_own_and_prompts_are_shared_only_where_that_is_right(family: Family) -> None:
    model = family.build()
    batch = group_of_samples(seed=1)
    expected = plain_logprobs(model, batch)
    learner = learner_of(model)
    np.testing.assert_allclose(learner.forward(batch), expected, atol=1e-5)
    assert learner.forward_pass.shares_prompts == family.shares_prompts
    assert bool(learner.forward_pass.warnings) != family.shares_prompts


@each_family
def test_the_gradient_is_that_of_each_sequence_alone(family: Family) -> None:
    batch = group_of_samples(seed=2)
    together, alone = learner_of(family.build()), learner_of(family.build(), max_tokens=max(batch.lengths_B))
    together.forward_backward(batch)
    alone.forward_backward(batch)
    expected = gradient(alone)
    torch.testing.assert_close(gradient(together), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.guide("S11")
@each_family
def test_a_run_resumes_its_own_checkpoint_bit_for_bit(
    family: Family, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    # The forward pass of transformers' xLSTM fails in bfloat16.
    dtype: Literal["float32", "bfloat16"] = "float32" if family.model_type == "xlstm" else "bfloat16"
    family.build().save_pretrained(tmp_path / "initial")
    source = PathModel(path=str(tmp_path / "initial"), dtype=dtype)
    whole, resumed = (learner_of(build_model(source, seed=0)) for _ in range(2))
    whole.train(group_of_samples(seed=3))
    path = save_checkpoint(tmp_path, whole, tokenizer, CheckpointMetadata(step=1))
    resumed.train(group_of_samples(seed=4))
    load_checkpoint(path, resumed)
    assert whole.train(group_of_samples(seed=5)) == resumed.train(group_of_samples(seed=5))
    assert_equal(whole.model.state_dict(), resumed.model.state_dict())
    assert_equal(whole.optimizer.tensors(), resumed.optimizer.tensors())
    opened = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    load_checkpoint(path, resumed)
    assert_equal(opened.state_dict(), resumed.model.state_dict())


@each_family
def test_hugging_face_opens_the_weights_that_two_ranks_have_written(family: Family, tmp_path: Path) -> None:
    model = family.build()
    weights = model.state_dict(keep_vars=True)
    writer_of = writers(weights, 2)
    files = {}
    for rank in (0, 1):
        own = {name: tensor.detach() for name, tensor in weights.items() if writer_of[name] == rank}
        file = ranked_file("model", rank, 2)
        files[file] = write_weights(tmp_path / file, model, own)
    write_configuration(tmp_path, model)
    write_index(tmp_path, files)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_equal(opened.state_dict(), model.state_dict())
    saved, own = saved_weights(tmp_path, [tmp_path / file for file in files], model), opened.state_dict()
    for name in saved:
        saved.fill(name, own[name].zero_())
    assert_equal(own, model.state_dict())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_prompts_are_shared_under_each_implementation_of_attention(implementation: str) -> None:
    llama = dataclasses.replace(FAMILIES_BY_TYPE["llama"], settings={"attn_implementation": implementation})
    model, batch = llama.build(), group_of_samples(seed=1)
    expected = plain_logprobs(model, batch)
    learner = learner_of(model)
    np.testing.assert_allclose(learner.forward(batch), expected, atol=1e-5)
    assert learner.forward_pass.shares_prompts


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []
