"""The settings that the parts of the trainer get from the experiment."""

import gc
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from nexrl.models import build_model, iter_weights
from nexrl.spec import ExperimentSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer import build, server
from nexrl_trainer.build import build_learner, prepare_torch, reference_logprobs
from nexrl_trainer.forward import ForwardPass
from nexrl_trainer.server import run_checkpoints
from nexrl_trainer.step import Learner, MockLearner
from nexrl_trainer.step_metrics import LossMetrics, LossTotals
from tests.support.families import FAMILIES_BY_TYPE
from tests.support.patience import eventually
from tests.support.services import running_service, small_experiment

BFLOAT16 = {
    "scratch": {"alphabet": "01", "hiddenSize": 8, "intermediateSize": 8, "layers": 1, "heads": 1, "maxPositions": 32},
    "dtype": "bfloat16",
}
NOBODY = "127.0.0.1:1"
"""An address where nothing listens."""


def spec(**sections: object) -> ExperimentSpec:
    shape = {"alphabet": "01", "hiddenSize": 8, "intermediateSize": 8, "layers": 1, "heads": 1, "maxPositions": 32}
    document = {"model": {"scratch": shape}, "data": {"type": "mock"}, "trainer": {"steps": 10}}
    room = {"rollout": {"maxNewTokens": 8}, "inference": {"maxTokensPerRow": 32}}
    return ExperimentSpec.model_validate_json(json.dumps(document | room | sections))


@pytest.mark.guide("J8")
def test_the_learner_begins_at_step_0_with_the_weights_of_the_experiment() -> None:
    first, second = build_learner(spec()), build_learner(spec())
    assert (type(first), first.step) == (Learner, 0)
    weights = dict(iter_weights(second.model))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in iter_weights(first.model))


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_pytorch_repeats_operations_of_a_gpu_only_if_the_experiment_wants_it(
    monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        prepare_torch(spec(trainer={"steps": 10, "deterministic": is_deterministic}))
        assert torch.are_deterministic_algorithms_enabled() == is_deterministic
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if is_deterministic else None)
    finally:
        torch.use_deterministic_algorithms(mode=False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_attention_is_never_computed_by_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    prepare_torch(spec())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.guide("Q28")
def test_the_backend_decides_who_learns() -> None:
    assert isinstance(build_learner(spec(trainer={"steps": 10, "backend": "mock"})), MockLearner)


def test_the_initial_model_is_built_when_its_logprobs_are_first_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []

    def counted(*arguments: Any) -> Any:
        built.append(build_model(*arguments))
        return built[-1]

    monkeypatch.setattr(build, "build_model", counted)
    reference = reference_logprobs(spec(), shares_prompts=True)
    assert built == []
    batch = TrainBatch.pack([TrainSequence([4, 5], [False, True], [0.0, -1.0], 1.0)])
    assert (reference(batch) < 0).tolist() == (reference(batch) < 0).tolist() == [False, True]
    assert len(built) == 1


def test_what_the_learner_has_checked_is_not_checked_again_for_the_reference_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[object] = []
    check_model = ForwardPass._check_model

    def counted(*arguments: Any) -> Any:
        checks.append(arguments)
        return check_model(*arguments)

    monkeypatch.setattr(ForwardPass, "_check_model", counted)
    learner = build_learner(spec())
    assert len(checks) == 1
    batch = TrainBatch.pack([TrainSequence([4, 5], [False, True], [0.0, -1.0], 1.0)])
    reference = reference_logprobs(spec(), shares_prompts=learner.forward_pass.shares_prompts)
    np.testing.assert_array_equal(reference(batch), learner.forward(batch))
    assert len(checks) == 1


def test_the_reference_model_takes_the_memory_of_its_weights_only() -> None:
    shape = {"alphabet": "01", "hiddenSize": 64, "intermediateSize": 256, "layers": 2, "heads": 1, "maxPositions": 32}
    model = {"scratch": shape, "dtype": "bfloat16"}
    others = tensor_bytes()
    reference = reference_logprobs(spec(model=model, algorithm={"klCoefficient": 0.1}), shares_prompts=True)
    batch = TrainBatch.pack([TrainSequence([4, 5], [False, True], [0.0, -1.0], 1.0)])
    reference(batch)
    added = tensor_bytes() - others
    weights = sum(tensor.nbytes for _, tensor in iter_weights(build_model(spec(model=model).model, seed=0)))
    assert weights <= added < 1.2 * weights


def tensor_bytes() -> int:
    """Bytes of all tensors that exist."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_policy_reference_model_batches_and_optimizer_are_on_the_device_of_the_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On `meta`, which has no values: an operation that mixes two devices fails there as on a GPU."""
    monkeypatch.setattr(ForwardPass, "_check_model", lambda *_: True)  # reads values
    asked: list[str] = []

    def choose(field: str, name: str) -> torch.device:
        asked.append(f"{field}={name}")
        return torch.device("meta")

    monkeypatch.setattr(build, "choose_device", choose)
    experiment = spec(trainer={"steps": 10, "device": "cuda"}, model=BFLOAT16, algorithm={"klCoefficient": 0.1})
    batch = TrainBatch.pack(
        [TrainSequence([4, own, 5], [False, True, True], [0.0, -1.0, -1.0], 1.0, [0.0, -1.0, -1.0]) for own in (4, 5)]
    )
    learner = build_learner(experiment)
    monkeypatch.setattr(LossTotals, "metrics", lambda *_, **__: LossMetrics(0, 0, 0, 1, 1, 1, 0, 0, 0, 4, 2))
    learner.forward_backward(batch)
    masters = [tensor for name, tensor in learner.optimizer.tensors().items() if name.startswith("master.")]
    assert len(masters) == len(list(learner.model.parameters()))
    gradients = [master.grad for master in learner.optimizer._masters.values()]
    assert {None if tensor is None else tensor.device.type for tensor in [*masters, *gradients]} == {"meta"}
    with pytest.raises(NotImplementedError, match="meta tensor"):  # only when the result is read
        reference_logprobs(experiment, shares_prompts=True)(batch)
    assert asked == ["trainer.device=cuda"] * 2


async def test_a_trainer_on_the_cpu_of_a_machine_with_a_gpu_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "idle_gpu_warning", lambda field, device: f"{field}: {device}, beside a GPU")

    async def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    async with running_service(tmp_path, server.start, trajectory_pool=NOBODY, weight_sync=NOBODY):
        (message,) = await eventually(warnings)
    assert "trainer.device: cpu, beside a GPU" in message


async def test_a_trainer_warns_at_its_start_if_its_model_cannot_share_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    FAMILIES_BY_TYPE["mistral"].build().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    experiment = small_experiment(model={"path": str(tmp_path)})

    async def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    async with running_service(tmp_path, server.start, experiment, trajectory_pool=NOBODY, weight_sync=NOBODY):
        (message,) = await eventually(warnings)
    assert "do not share their prompt" in message
    assert "mistral" in message


@pytest.mark.guide("Q21", "Q41")
def test_checkpoints_are_where_the_experiment_says_and_start_from_what_it_names(tmp_path: Path) -> None:
    default = run_checkpoints(tmp_path, spec())
    assert (default.folder, default.start_from) == (tmp_path / "checkpoints", None)
    resume = {"mode": "from_path", "path": "/kept/global_step_3"}
    chosen = run_checkpoints(tmp_path, spec(checkpoint={"path": str(tmp_path / "kept")}, resume=resume))
    assert (chosen.folder, chosen.start_from) == (tmp_path / "kept", Path("/kept/global_step_3"))
    assert chosen.folder.is_dir()
