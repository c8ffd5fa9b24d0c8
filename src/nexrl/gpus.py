"""The GPUs of this machine, found without PyTorch."""

import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable with the GPUs that CUDA shows to a process; it ends at the first name that is none, such as -1."""


def has_gpu(device_files: Path = Path("/dev")) -> bool:
    """Return whether this machine, or this container, has an NVIDIA GPU."""
    return _count(device_files) > 0


def usable_gpus(environment: Mapping[str, str] = os.environ, device_files: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that processes started with `environment` can use, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := environment.get(VISIBLE)) is None:
        return tuple(str(number) for number in range(_count(device_files)))
    names = (name.strip() for name in visible.split(","))
    return tuple(takewhile(lambda name: name and not name.startswith("-"), names))


def _count(device_files: Path) -> int:
    return len(list(device_files.glob("nvidia[0-9]*")))
