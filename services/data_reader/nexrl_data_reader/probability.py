"""The user's function of `data.sampler: {type: python}`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from nexrl.code_reference import USER_CODE_ERRORS, load_reference
from nexrl.datasets import Task
from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.exception_text import exception_text

LEAST = 0.01
"""Smallest share of the turns of a task that is granted, as in the spec."""


class Probability:
    """Calls the function, and checks what it returns."""

    def __init__(self, reference: str, folder: Path) -> None:
        """Look the function up in `folder` first. Raises InvalidArgumentError."""
        self._name = f"spec.data.sampler.function: {reference}"
        try:
            self._function = cast(Callable[[Task, float | None], Any], load_reference(reference, folder))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"spec.data.sampler.function: {error.message}") from error

    def __call__(self, task: Task, reward: float | None) -> float:
        """Return which share of the task's turns is granted. Raises FailedPreconditionError that names the function."""
        called = f"{self._name}({task['id']}, {reward})"
        try:
            share = float(self._function(task, reward))
        except USER_CODE_ERRORS as error:
            raise FailedPreconditionError(f"{called} raised {exception_text(error)}") from error
        if not (math.isfinite(share) and LEAST <= share <= 1):
            raise FailedPreconditionError(f"{called} returned {share}; it must return a number from {LEAST} to 1")
        return share
