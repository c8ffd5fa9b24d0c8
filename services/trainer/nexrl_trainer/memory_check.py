"""Compares the memory that training needs, as nexrl.plan calculates it, with that of the device, before it starts."""

import logging

import torch

from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.plan.memory_size import format_bytes, host_bytes
from nexrl.plan.model_size import size_of
from nexrl.plan.training import RankMemory, Training, rank_memory
from nexrl.spec import ExperimentSpec

log = logging.getLogger(__name__)


def memory_warning(spec: ExperimentSpec, device: torch.device) -> str:
    """Return a warning if a batch that fills its micro-batches may not fit, else "".

    Raises InvalidArgumentError if weights and optimizer alone do not fit, so that no step is possible. Activations and
    logits are estimates, and batches may be smaller, so they never lead to a refusal. A model whose size cannot be read
    is not checked.
    """
    if spec.trainer.backend == "mock":
        return ""
    try:
        memory, available_bytes = rank_memory(size_of(spec.model), Training.of(spec)), _device_bytes(device)
    except NexrlError as error:
        log.info("memory is not checked: %s", error)
        return ""
    return compare(memory, spec, device.type, available_bytes)


def compare(memory: RankMemory, spec: ExperimentSpec, device_type: str, available_bytes: int) -> str:
    """As `memory_warning`, on a device of this type and memory. The ranks share a CPU's, and have a GPU each."""
    processes = spec.trainer.processes_per_replica if device_type == "cpu" else 1
    # The plan counts adapters at most. A trainer of RPCs may never make a step, which allocates the moments.
    allocates_moments = spec.model.lora is None and spec.trainer.steps > 0
    critic = memory.critic if spec.trainer.steps > 0 else 0
    least = processes * (memory.weights + memory.masters + memory.optimizer * allocates_moments + critic)
    step = processes * (memory.step - memory.frozen) + memory.frozen
    where = "this machine, or its cgroup, has" if device_type == "cpu" else "the GPU has"
    has = f"{where} {format_bytes(available_bytes)}"
    if least > available_bytes:
        raise InvalidArgumentError(
            f"trainer: weights and optimizer need {format_bytes(least)}, but {has}; use more memory"
            + ("" if device_type == "cpu" else ", or more GPUs (trainer.processesPerReplica)")
        )
    if step <= available_bytes:
        return ""
    return (
        f"trainer: a step may need {format_bytes(step)} if a micro-batch has {Training.of(spec).micro_tokens} tokens, "
        f"of them {format_bytes(processes * memory.activations)} for activations, but {has}; "
        + ("set" if spec.trainer.activation_checkpointing == "none" else "besides")
        + " trainer.activationCheckpointing full, lower trainer.maxTokensPerMicroBatch"
    )


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()
