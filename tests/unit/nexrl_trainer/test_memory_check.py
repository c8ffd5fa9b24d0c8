"""What the trainer says at start of an experiment that does not fit into its memory."""

from pathlib import Path

import pytest
import torch

from nexrl.errors import InvalidArgumentError
from nexrl.plan.model_size import size_of
from nexrl.plan.training import RankMemory, Training, rank_memory
from nexrl.spec import ExperimentSpec
from nexrl_trainer import memory_check
from nexrl_trainer.memory_check import compare, memory_warning
from nexrl_trainer.server import start
from tests.support.patience import eventually
from tests.support.services import running_service, small_experiment

CPU = torch.device("cpu")
NOBODY = "127.0.0.1:1"
"""An address where nothing listens."""


def _spec(**trainer: object) -> ExperimentSpec:
    return small_experiment(trainer={"steps": 4, **trainer}).spec


def _memory(spec: ExperimentSpec) -> RankMemory:
    return rank_memory(size_of(spec.model), Training.of(spec))


def _least(spec: ExperimentSpec) -> int:
    memory = _memory(spec)
    return memory.weights + memory.masters + memory.optimizer


def test_experiment_that_fits_has_no_warning() -> None:
    assert memory_warning(_spec(), CPU) == ""


def test_weights_and_optimizer_that_do_not_fit_are_refused_with_the_numbers() -> None:
    spec = _spec()
    memory, least = _memory(spec), _least(spec)
    with pytest.raises(InvalidArgumentError, match=r"weights and optimizer need .* MiB, but the GPU has .* MiB"):
        compare(memory, spec, "cuda", least - 1)
    with pytest.raises(InvalidArgumentError, match="this machine, or its cgroup, has"):
        compare(memory, spec, "cpu", least - 1)


def test_a_critic_counts_as_weights_and_optimizer() -> None:
    spec = small_experiment(trainer={"steps": 4}, algorithm={"type": "ppo"}).spec
    memory = _memory(spec)
    assert memory.critic > 0
    with pytest.raises(InvalidArgumentError, match="weights and optimizer need"):
        compare(memory, spec, "cuda", _least(spec) + memory.critic - 1)


def test_activations_that_do_not_fit_are_a_warning_only() -> None:
    spec = _spec()
    warning = compare(_memory(spec), spec, "cpu", _least(spec))
    assert "a step may need" in warning
    assert "if a micro-batch has 8192 tokens" in warning
    assert "trainer.activationCheckpointing" in warning


def test_ranks_share_the_memory_of_a_cpu_and_have_a_gpu_each() -> None:
    spec = _spec(processesPerReplica=4)
    memory = _memory(spec)
    assert "a step may need" in compare(memory, spec, "cuda", _least(spec))
    with pytest.raises(InvalidArgumentError, match="weights and optimizer"):
        compare(memory, spec, "cpu", _least(spec))


def test_model_of_unknown_size_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "host_bytes", lambda: 1)
    (tmp_path / "config.json").write_text("{}")
    unknown = small_experiment(model={"path": str(tmp_path)}).spec
    assert memory_warning(unknown, CPU) == ""
    with pytest.raises(InvalidArgumentError):
        memory_warning(_spec(), CPU)


def test_mock_trainer_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "host_bytes", lambda: 1)
    assert memory_warning(_spec(backend="mock"), CPU) == ""


async def test_trainer_refuses_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "host_bytes", lambda: 1)
    with pytest.raises(InvalidArgumentError, match="weights and optimizer need"):
        async with running_service(tmp_path, start, small_experiment()):
            pass


async def test_trainer_warns_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = small_experiment()
    monkeypatch.setattr(memory_check, "host_bytes", lambda: _least(experiment.spec))

    async def warnings() -> list[str]:
        return [record.message for record in caplog.records if "a step may need" in record.message]

    async with running_service(tmp_path, start, experiment, trajectory_pool=NOBODY, weight_sync=NOBODY):
        await eventually(warnings)
