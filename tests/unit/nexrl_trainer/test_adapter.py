"""LoRA: only the adapter is trained, published and saved, and its files are those of PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from nexrl.adapters import CONFIG_FILE, WEIGHTS_FILE, merged_model
from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.models import build_model, iter_weights
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.model import LoraSpec, ModelSpec
from nexrl.train_batch import TrainBatch
from nexrl_trainer.checkpoint import CheckpointMetadata, load_checkpoint
from nexrl_trainer.layers import LayerSettings
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.trained_weights import AdapterSettings
from tests.support.adapters import TINY, DataType, adapter_model, save_base
from tests.support.checkpoints import save_checkpoint

BuildLearner = Callable[..., Learner]
BuildBatch = Callable[..., TrainBatch]
BUCKET_BYTES = 2**20


def lora_learner(model: ModelSpec | None = None, *, layers: LayerSettings | None = None, **algorithm: Any) -> Learner:
    """Return a learner of an adapter. Equal arguments return equal learners."""
    source = model or adapter_model()
    spec = AlgorithmSpec(**{"learning_rate": 1e-2, "warmup_steps": 2, **algorithm})
    settings = LearnerSettings(spec, 10, layers=layers or LayerSettings(), adapter=AdapterSettings(source, seed=3))
    return Learner(build_model(source, source.seed), settings)


def saved(folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(folder, learner, tokenizer, CheckpointMetadata(step=learner.step))


def trained_state(learner: Learner) -> dict[str, Tensor]:
    return {**learner.trained.tensors(), **learner.optimizer.tensors()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(4, 14)[None]).logits
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_changes(build_batch: BuildBatch, dtype: DataType) -> None:
    learner = lora_learner(adapter_model(dtype=dtype))
    before = {name: tensor.clone() for name, tensor in learner.model.named_parameters()}
    for step in range(3):
        assert learner.train(build_batch(step)).grad_norm > 0
    changed = {name for name, tensor in learner.model.named_parameters() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert {name.partition(".")[2] for name in learner.optimizer.tensors()} == changed


def test_a_new_adapter_changes_nothing_and_depends_on_the_seed_only(build_batch: BuildBatch) -> None:
    torch.rand(3)
    first = lora_learner()
    torch.rand(5)
    assert_equal(first.trained.tensors(), lora_learner().trained.tensors())
    plain = Learner(build_model(adapter_model(), 0), LearnerSettings(AlgorithmSpec(), 10))
    np.testing.assert_array_equal(first.forward(build_batch(0)), plain.forward(build_batch(0)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_the_adapter_in_float32(dtype: DataType) -> None:
    learner = lora_learner(adapter_model(dtype=dtype))
    manifest = learner.snapshot(BUCKET_BYTES).manifest
    layers = [name for name, m in learner.model.named_modules() if hasattr(m, "base_layer")]
    names = {f"{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"}
    assert {tensor.name for tensor in manifest.tensors} == names
    assert {tensor.data_type for tensor in manifest.tensors} == {"float32"}
    assert manifest.base_digest
    dense = Learner(build_model(adapter_model(dtype="float32"), 0), LearnerSettings(AlgorithmSpec(), 10))
    assert manifest.nbytes < dense.snapshot(BUCKET_BYTES).manifest.nbytes / 4


def test_named_targets_get_an_adapter_and_no_others() -> None:
    learner = lora_learner(adapter_model(target_modules=("q_proj", "model.layers.1.mlp.up_proj")))
    found = {name.rpartition(".lora_")[0] for name in learner.trained.tensors()}
    attention = {f"model.layers.{layer}.self_attn.q_proj" for layer in range(TINY.layers)}
    assert found == attention | {"model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens", "layers.0", "proj"])
def test_a_target_that_is_no_linear_layer_is_refused(target: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"model.lora.targetModules.*'{target}'.*q_proj.*all-linear"):
        lora_learner(adapter_model(target_modules=("v_proj", target)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [LayerSettings(), LayerSettings(activation_checkpointing="full")])
def test_a_resumed_run_equals_the_run_that_was_never_stopped(
    tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase, dtype: DataType, layers: LayerSettings
) -> None:
    model = adapter_model(dtype=dtype)
    whole, resumed = lora_learner(model, layers=layers), lora_learner(model)
    for step in range(2):
        whole.train(build_batch(step))
    resumed.train(build_batch(9))  # whatever it held before must be gone
    load_checkpoint(saved(tmp_path, whole, tokenizer), resumed)
    for step in range(2, 5):
        assert whole.train(build_batch(step)) == resumed.train(build_batch(step))
    assert_equal(trained_state(whole), trained_state(resumed))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it
def test_peft_opens_a_checkpoint(tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase) -> None:
    learner = lora_learner()
    learner.train(build_batch(0))
    path = saved(tmp_path, learner, tokenizer)
    base = build_model(adapter_model(), 0)
    untrained = logits(base)
    opened = PeftModel.from_pretrained(base, str(path))
    assert torch.equal(logits(opened), logits(learner.model))
    assert not torch.equal(logits(learner.model), untrained)
    assert not list(path.glob("model*.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_computes_what_the_adapter_does(
    tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase, dtype: DataType
) -> None:
    learner = lora_learner(adapter_model(dtype=dtype))
    for step in range(4):
        learner.train(build_batch(step))
    model = merged_model(saved(tmp_path, learner, tokenizer))
    assert dict(iter_weights(model)).keys() == dict(iter_weights(build_model(adapter_model(), 0))).keys()
    # A merged weight is rounded to its type.
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    torch.testing.assert_close(logits(model).float(), logits(learner.model).float(), rtol=0, atol=tolerance)


def test_a_checkpoint_of_another_base_or_kind_is_refused(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = saved(tmp_path / "adapter", lora_learner(), tokenizer)
    for other in (adapter_model(seed=1), adapter_model(alpha=5.0)):
        with pytest.raises(FailedPreconditionError, match="another base"):
            load_checkpoint(path, lora_learner(other))
    with pytest.raises(FailedPreconditionError, match="of another model"):
        load_checkpoint(path, lora_learner(adapter_model(target_modules=("q_proj",))))
    with pytest.raises(FailedPreconditionError, match=r"is an adapter, but model\.lora is not set"):
        load_checkpoint(path, build_learner())
    whole = save_checkpoint(tmp_path / "whole", build_learner(), tokenizer, CheckpointMetadata(step=0))
    with pytest.raises(FailedPreconditionError, match=r"is no adapter, but model\.lora is set"):
        load_checkpoint(whole, lora_learner())


def test_training_begins_with_the_initial_adapter(
    tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    first = lora_learner()
    first.train(build_batch(0))
    path = saved(tmp_path, first, tokenizer)
    second = lora_learner(adapter_model(initial_adapter=str(path)))
    assert_equal(first.trained.tensors(), second.trained.tensors())


def test_an_initial_adapter_that_does_not_fit_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = saved(tmp_path, lora_learner(), tokenizer)
    for changes, reason in (
        ({"rank": 3, "alpha": 6.0}, "r is 3, as in model.lora, not 2"),
        ({"alpha": 8.0}, "lora_alpha is 8.0"),
        ({"target_modules": ("q_proj",)}, "lora_A.weight is absent, as in this base"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"model.lora.initialAdapter.*{reason}"):
            lora_learner(adapter_model(initial_adapter=str(path), **changes))
    other = save_base(tmp_path / "wide", hidden_size=24)
    with pytest.raises(InvalidArgumentError, match=r"model.lora.initialAdapter.*lora_B.weight is \(24, 2\)"):
        lora_learner(adapter_model(other, initial_adapter=str(path)))
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(InvalidArgumentError, match="use_dora is None"):
        lora_learner(adapter_model(initial_adapter=str(path)))
    (path / WEIGHTS_FILE).write_bytes(b"torn")
    with pytest.raises(InvalidArgumentError, match="can be read"):
        lora_learner(adapter_model(initial_adapter=str(path)))


def test_the_reference_is_the_base_with_the_adapter_off(build_batch: BuildBatch) -> None:
    learner = lora_learner()
    before = learner.forward(build_batch(7))
    for step in range(3):
        learner.train(build_batch(step))
    trained = learner.forward(build_batch(7))
    np.testing.assert_array_equal(learner.forward_reference(build_batch(7)), before)
    np.testing.assert_array_equal(learner.forward(build_batch(7)), trained)
    assert not np.array_equal(trained, before)


def test_a_checkpoint_contains_only_the_adapter_and_its_optimizer_state(
    tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = lora_learner()
    learner.train(build_batch(0))
    path = saved(tmp_path, learner, tokenizer)
    weights = sum(tensor.numel() for tensor in learner.trained.tensors().values())
    assert sum(tensor.numel() for tensor in load_file(path / WEIGHTS_FILE).values()) == weights
    state = load_file(path / "training_state.safetensors")
    moments = sum(tensor.numel() for name, tensor in state.items() if name.startswith("exp_avg"))
    assert moments == 2 * weights


def test_the_setting_is_checked() -> None:
    with pytest.raises(ValueError, match="all-linear stands alone"):
        LoraSpec(rank=2, alpha=2.0, target_modules=("all-linear", "q_proj"))
    assert isinstance(build_model(adapter_model(), 0).get_output_embeddings(), nn.Linear)
