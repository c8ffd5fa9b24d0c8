"""The user's function of `data.sampler: {type: python}`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from nexrl.code_reference import USER_CODE_ERRORS, load_reference
from nexrl.datasets import Task
from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.exception_text import exception_text
from nexrl.spec.sampler import LEAST_PROBABILITY


class Probability:
    """Calls the function, and checks what it returns."""

    def __init__(self, reference: str, folder: Path) -> None:
        """Look the function up in `folder` first. Raises InvalidArgumentError."""
        self._name = f"spec.data.sampler.function: {reference}"
        self.newest_call = ""
        """The newest call, for errors: the function, the task, and its reward."""
        try:
            self._function = cast(Callable[[Task, float | None], Any], load_reference(reference, folder))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"spec.data.sampler.function: {error.message}") from error

    def __call__(self, task: Task, reward: float | None) -> float:
        """Return which share of the task's turns is granted. Raises FailedPreconditionError that names the call."""
        called = self.newest_call = f"{self._name}({task['id']}, {reward})"
        try:
            returned = self._function(task, reward)
            share = float("nan") if isinstance(returned, str | bytes) else float(returned)
        except USER_CODE_ERRORS as error:
            raise FailedPreconditionError(f"{called} raised {exception_text(error)}") from error
        if not LEAST_PROBABILITY <= share <= 1:
            needed = f"it must return a number from {LEAST_PROBABILITY} to 1"
            raise FailedPreconditionError(f"{called} returned {returned!r}; {needed}")
        return share
