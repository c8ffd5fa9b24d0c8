"""Runs `nexrl serve trainer` in a process that can kill itself at a chosen point of its code."""

import ctypes
import os
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nexrl.parent_death import PR_SET_PDEATHSIG
from nexrl.storage import RunStorage
from nexrl_trainer import checkpoint, server
from nexrl_trainer.checkpoint import HeldCheckpoint
from nexrl_trainer.step import Learner
from tests.support.patience import LIMIT_SECONDS

POINTS: Mapping[str, tuple[Any, str]] = {
    "update": (Learner, "update"),  # gradients exist, but no weight has changed yet
    "sync to disk": (os, "fsync"),  # for each file of a checkpoint, its marker, its folder and the parent folder
    "delete": (shutil, "rmtree"),
    "upload": (RunStorage, "put"),  # each file, of a checkpoint or not
}
"""The points at which a process can die, and the function that it calls there."""


class Suicide(NamedTuple):
    """The process kills itself instead of making call number `call` (from 1) at one of POINTS.

    With `steps_meanwhile`, the call is made by the thread that writes a checkpoint. It first waits until the trainer
    has made so many more steps than the checkpoint contains.
    """

    point: str
    call: int
    steps_meanwhile: int = 0


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


def _arm(point: str, call: int, steps_meanwhile: int) -> None:
    owner, name = POINTS[point]
    real, left = getattr(owner, name), call
    steps = _StepsMeanwhile() if steps_meanwhile else None

    def armed(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            if steps is not None:
                steps.wait_for(steps_meanwhile)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, armed)


class _StepsMeanwhile:
    """Counts the steps that are made while a checkpoint is being written."""

    def __init__(self) -> None:
        self._made, self._written, self._changed = 0, 0, threading.Condition()
        end_step, write = Learner.end_step, HeldCheckpoint.write

        def counted_end(learner: Learner) -> None:
            end_step(learner)
            with self._changed:
                self._made = learner.step
                self._changed.notify_all()

        def noted_write(held: HeldCheckpoint) -> Path:
            self._written = held.metadata.step
            return write(held)

        Learner.end_step = counted_end  # type: ignore[method-assign, assignment]
        HeldCheckpoint.write = noted_write  # type: ignore[method-assign, assignment]

    def wait_for(self, steps: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._made >= self._written + steps, LIMIT_SECONDS)
