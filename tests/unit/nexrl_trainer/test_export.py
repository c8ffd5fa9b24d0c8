"""`nexrl export`: a plain Hugging Face folder from any checkpoint."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from nexrl.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from nexrl.export import export
from nexrl.models import build_model
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch
from nexrl_trainer.checkpoint import CheckpointMetadata
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.trained_weights import AdapterSettings
from tests.support.adapters import adapter_model, save_base
from tests.support.checkpoints import save_checkpoint
from tests.support.patience import LIMIT_SECONDS

BuildBatch = Callable[..., TrainBatch]
MAX_DIFFERENCE = 1e-5
"""Of logits: merging adds float32 numbers in another order."""


def trained(build_batch: BuildBatch, path: Path | None = None, *, is_lora: bool = True) -> Learner:
    source = adapter_model(path)
    adapter = AdapterSettings(source, seed=0) if is_lora else None
    algorithm = AlgorithmSpec(learning_rate=0.05)
    learner = Learner(build_model(source, source.seed), LearnerSettings(algorithm, 10, adapter=adapter))
    for step in range(3):
        learner.train(build_batch(step))
    return learner


def saved(folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(folder, learner, tokenizer, CheckpointMetadata(step=learner.step))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model.eval()(torch.arange(4, 14)[None]).logits
    return found


@pytest.mark.parametrize("is_lora", [True, False])
def test_the_exported_model_computes_what_the_trained_one_does(
    tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase, is_lora: bool
) -> None:
    learner = trained(build_batch, is_lora=is_lora)
    path = saved(tmp_path, learner, tokenizer)
    command = [sys.executable, "-m", "nexrl.cli", "export", str(path), str(tmp_path / "exported")]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
    names = {file.name for file in (tmp_path / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {name for name in names if "adapter" in name or "state" in name or "checkpoint" in name}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    torch.testing.assert_close(logits(opened), logits(learner.model), rtol=0, atol=MAX_DIFFERENCE)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("12").input_ids == tokenizer("12").input_ids
    before = build_model(adapter_model(), 0)
    assert (logits(opened) - logits(before)).abs().max() > 1000 * MAX_DIFFERENCE


def test_an_existing_folder_and_what_is_no_checkpoint_are_refused(
    tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = saved(tmp_path, trained(build_batch), tokenizer)
    (tmp_path / "there").mkdir()
    with pytest.raises(AlreadyExistsError, match="there exists"):
        export(path, tmp_path / "there")
    with pytest.raises(NotFoundError, match="not a complete checkpoint"):
        export(tmp_path / "there", tmp_path / "new")
    (path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(FailedPreconditionError, match="missing or damaged"):
        export(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_adapter_whose_base_has_changed_is_refused(
    tmp_path: Path, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = saved(tmp_path, trained(build_batch, save_base(tmp_path / "base")), tokenizer)
    export(path, tmp_path / "first")
    assert json.loads((path / "base_model.json").read_text())["model"]["path"] == str(tmp_path / "base")
    save_base(tmp_path / "base", seed=1)
    with pytest.raises(FailedPreconditionError, match="has other weights now"):
        export(path, tmp_path / "second")
    assert not (tmp_path / "second").exists()
