"""`nexrl serve trainer` in a process that can be told to kill itself within its own code."""

import ctypes
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nexrl.bound import PR_SET_PDEATHSIG
from nexrl_trainer import checkpoint, server
from nexrl_trainer.step import Learner

POINTS: Mapping[str, tuple[Any, str]] = {
    "update": (Learner, "optimizer_step"),  # gradients are there, no weight has changed
    "sync to disk": (os, "fsync"),  # once for each file of a checkpoint, its marker, its folder, and the folder above
    "delete": (shutil, "rmtree"),
}
"""What a process may die at, and what it calls there."""


class Suicide(NamedTuple):
    """The process kills itself instead of making call number `call` (from 1) at one of POINTS."""

    point: str
    call: int


def main(environment: Mapping[str, str], log: Path, suicide: Suicide | None, settled_seconds: float) -> None:
    """Serve with these settings, as `nexrl serve trainer` does, until the process is told to end or is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    checkpoint.SETTLED_SECONDS = settled_seconds
    if suicide is not None:
        _arm(*suicide)
    server.main()


def _arm(point: str, call: int) -> None:
    owner, name = POINTS[point]
    real, left = getattr(owner, name), call

    def armed(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, armed)
