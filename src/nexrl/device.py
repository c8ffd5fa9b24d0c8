"""The device that a process computes on: the setting `device` of trainer and built-in engine."""

from pathlib import Path

import torch

from nexrl.errors import FailedPreconditionError
from nexrl.gpus import has_gpu


def choose_device(field: str, name: str) -> torch.device:
    """Return the device that `name` stands for: auto is CUDA if PyTorch can use it.

    Raises FailedPreconditionError, which names `field`, for cuda if PyTorch cannot use CUDA.
    """
    is_usable = torch.cuda.is_available()
    if name == "cuda" and not is_usable:
        raise FailedPreconditionError(
            f"{field}: cuda, but PyTorch {torch.__version__} cannot use a CUDA device here; install PyTorch for CUDA "
            "on a machine with a GPU, or set auto or cpu"
        )
    return torch.device("cuda" if is_usable and name != "cpu" else "cpu")


def exclude_cudnn_attention() -> None:
    """Take cuDNN's kernels out of PyTorch's choice for attention, in this process.

    PyTorch 2.11 chooses them on Hopper in 16 bits, and they build a plan for each new shape. In the engine each decode
    step has a new shape: 41 ms instead of 0.8 ms a step on an H200 (docs/reference/gpus.md).
    """
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def idle_gpu_warning(field: str, device: torch.device, device_files: Path = Path("/dev")) -> str:
    """Return a warning if `device` is the CPU and the machine has a GPU; empty otherwise."""
    if device.type != "cpu":
        return ""
    if torch.cuda.is_available():
        return f"{field}: computes on the CPU although a CUDA device is idle; set auto or cuda to use it"
    if has_gpu(device_files):
        return (
            f"{field}: computes on the CPU although this machine has a GPU, because PyTorch {torch.__version__} cannot "
            "use it; install PyTorch for CUDA, and a driver that fits"
        )
    return ""
