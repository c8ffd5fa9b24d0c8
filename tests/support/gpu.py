"""What tests on a GPU have in common. `python -m tests.support.gpu` fails where there is none."""

import sys
from collections.abc import Callable

import pytest
import torch

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
]
"""The marks of a module: `pytestmark = needs_gpu`."""

SHARED_GPU_NCCL = 23000
"""The first version of NCCL with which several processes can use one GPU (NCCL_MULTI_RANK_GPU_ENABLE)."""


def peak_gpu_bytes(function: Callable[[], object]) -> int:
    """Run `function`, and return the most bytes that tensors took on the GPU at once beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def require_gpu() -> None:
    """Exit with a message unless PyTorch can use a GPU; name the GPU otherwise."""
    if not torch.cuda.is_available():
        sys.exit(
            f"no GPU: PyTorch {torch.__version__} cannot use a CUDA device here, so nothing was run. It needs a "
            "machine with a GPU and its driver, and PyTorch for CUDA, which pip installs from the public index"
        )
    sys.stdout.write(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}\n")


if __name__ == "__main__":
    require_gpu()
