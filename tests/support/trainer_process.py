"""Runs `nexrl serve trainer` in a process that can kill itself at a chosen point of its code."""

import ctypes
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nexrl.parent_death import PR_SET_PDEATHSIG
from nexrl.storage import RunStorage
from nexrl_trainer import checkpoint, server
from nexrl_trainer.step import Learner

POINTS: Mapping[str, tuple[Any, str]] = {
    "update": (Learner, "update"),  # gradients exist, but no weight has changed yet
    "sync to disk": (os, "fsync"),  # for each file of a checkpoint, its marker, its folder and the parent folder
    "delete": (shutil, "rmtree"),
    "upload": (RunStorage, "put"),  # each file, of a checkpoint or not
}
"""The points at which a process can die, and the function that it calls there."""


class Suicide(NamedTuple):
    """The process kills itself instead of making call number `call` (from 1) at one of POINTS."""

    point: str
    call: int


def main(environment: Mapping[str, str], log: Path, suicide: Suicide | None, settled_seconds: float) -> None:
    """Serve with these settings, as `nexrl serve trainer` does, until the process is stopped or killed."""
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
