"""The GPU with which a process takes part in a broadcast by NCCL."""

import logging
from dataclasses import dataclass

import torch

from nexrl.errors import FailedPreconditionError
from nexrl.weights.nccl_communicator import library

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A device of this process, and its UUID, by which others see whether they share it."""

    device: torch.device
    uuid: str


def gpu_for_transfer(setting: str, device: torch.device) -> Gpu | None:
    """Return the GPU that `device` is; None if weights go through host memory.

    `setting` is that of spec.weightSync.transport: None for gloo, and for auto without a GPU or without NCCL. Raises
    FailedPreconditionError for nccl without either.
    """
    if setting == "gloo":
        return None
    try:
        if device.type != "cuda":
            raise FailedPreconditionError(
                f"weightSync.transport: nccl, but this process computes on {device.type}; set auto or gloo, or give "
                "trainer and replicas a GPU each"
            )
        library()
    except FailedPreconditionError as error:
        if setting == "nccl":
            raise
        if device.type == "cuda":
            log.warning("weights go through host memory: %s", error)
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"  # as nvidia-smi has it
    return Gpu(torch.device("cuda", index), name)
