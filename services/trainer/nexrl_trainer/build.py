"""Builds what computes, from the experiment: the same on all ranks of a trainer."""

import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from nexrl.device import choose_device, exclude_cudnn_attention, idle_gpu_warning
from nexrl.errors import FailedPreconditionError, naming
from nexrl.models import build_model
from nexrl.spec import ExperimentSpec
from nexrl.spec.critic import Ppo
from nexrl.spec.model import ModelSpec
from nexrl_trainer.critic import give_value_head
from nexrl_trainer.distillation import check_teacher
from nexrl_trainer.forward import ForwardPass, ForwardSettings
from nexrl_trainer.layers import LayerSettings
from nexrl_trainer.processor import Forward
from nexrl_trainer.ranks import ONE_RANK, Ranks
from nexrl_trainer.step import Learner, LearnerSettings, MockLearner
from nexrl_trainer.trained_weights import AdapterSettings

_DEVICE = "trainer.device"


def prepare_torch(spec: ExperimentSpec) -> None:
    """Set what PyTorch and transformers have one of in a process."""
    torch.set_num_threads(spec.trainer.threads_per_process)
    torch.manual_seed(spec.trainer.seed)
    exclude_cudnn_attention()
    if spec.trainer.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it PyTorch refuses products on CUDA in this mode
        torch.use_deterministic_algorithms(mode=True)
    transformers_logging.disable_progress_bar()  # no terminal shows it, and its lock would start another process


def device_of(spec: ExperimentSpec, rank: int = 0) -> torch.device:
    """Return the device of a rank. Raises FailedPreconditionError if there is none for it."""
    device, processes = choose_device(_DEVICE, spec.trainer.device), spec.trainer.processes_per_replica
    if device.type == "cpu" or processes == 1:
        return device
    if processes > torch.cuda.device_count():
        raise FailedPreconditionError(
            f"trainer.processesPerReplica: {processes}, but there are {torch.cuda.device_count()} CUDA devices; set at "
            "most so many, or trainer.device cpu"
        )
    return torch.device("cuda", rank % processes)


def build_learner(
    spec: ExperimentSpec, folder: Path = Path(), ranks: Ranks = ONE_RANK, kind: type[Learner] = Learner
) -> Learner:
    """Build the model with its initial weights, and its optimizer. A loss of the user is looked up in `folder`."""
    kind = MockLearner if spec.trainer.backend == "mock" else kind
    layers = LayerSettings(spec.trainer.activation_checkpointing, spec.trainer.compile)
    adapter = AdapterSettings(spec.model, spec.trainer.seed) if spec.model.lora else None
    settings = LearnerSettings(spec.algorithm, spec.trainer.steps, _forward_settings(spec), folder, layers, adapter)
    has_critic = isinstance(spec.algorithm, Ppo) and kind is not MockLearner
    critic_model = partial(_critic_model, spec, ranks.rank) if has_critic else None
    return kind(_built(spec, spec.model, ranks.rank), settings, ranks, critic_model)


def reference_logprobs(spec: ExperimentSpec, *, shares_prompts: bool) -> Forward:
    """Return a function for log-probabilities under the initial weights, in a model of their own.

    An adapter needs none: its learner has the base (`Learner.forward_reference`).

    Its first call builds the model, because most losses never need it. `shares_prompts` is what the checks of the
    learner's model have found: the architecture is the same, so they are not repeated.
    """

    @cache
    def reference() -> ForwardPass:
        assert spec.model.lora is None, "the learner of an adapter has the base: a second one would only take memory"
        return _frozen(spec, spec.model, shares_prompts=shares_prompts)

    return lambda batch: reference().logprobs(batch)


def teacher_logprobs(spec: ExperimentSpec) -> Forward | None:
    """Load `algorithm.teacher`, and return a function for log-probabilities under it; None without a teacher.

    They are those of the distribution that samples are drawn from: at the temperature of the rollout, truncated as
    there. Raises what `check_teacher` raises, and what `ForwardPass` raises for this model.
    """
    if spec.algorithm.teacher is None:
        return None
    teacher = spec.algorithm.teacher.model(spec.model.dtype)
    check_teacher(teacher, spec.model)
    with naming("algorithm.teacher"):
        return _frozen(spec, teacher).logprobs


def learner_warnings(learner: Learner) -> Sequence[str]:
    """Return what is right and slower than it could be."""
    idle_gpu = "" if isinstance(learner, MockLearner) else idle_gpu_warning(_DEVICE, learner.model.device)
    return [*learner.forward_pass.warnings, *filter(None, [idle_gpu])]


def _frozen(spec: ExperimentSpec, model: ModelSpec, *, shares_prompts: bool | None = None) -> ForwardPass:
    """Build a model that is not trained, on the device of rank 0, whole. `shares_prompts`: see ForwardPass."""
    weights = _built(spec, model).requires_grad_(requires_grad=False)
    return ForwardPass(weights, _forward_settings(spec), shares_prompts=shares_prompts)


def _critic_model(spec: ExperimentSpec, rank: int) -> PreTrainedModel:
    """Build the model of the critic: the initial one, with a value head."""
    model = _built(spec, spec.model, rank)
    give_value_head(model)
    return model


def _built(spec: ExperimentSpec, model: ModelSpec, rank: int = 0) -> PreTrainedModel:
    """Build a model with its initial weights, on the device of the rank."""
    device: Any = device_of(spec, rank)  # transformers has no type for the argument of `to`
    built: PreTrainedModel = build_model(model, model.seed).to(device)
    return built


def _forward_settings(spec: ExperimentSpec) -> ForwardSettings:
    rollout = spec.rollout
    return ForwardSettings(
        rollout.temperature,
        spec.trainer.max_tokens_per_micro_batch,
        spec.max_sequence_tokens,
        rollout.top_p,
        rollout.top_k,
    )
