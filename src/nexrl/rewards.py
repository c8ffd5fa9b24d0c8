"""Reward functions: the interface for those of users, and the built-in ones."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, cast

from nexrl.code_reference import USER_CODE_ERRORS, is_a, load_reference
from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.exception_text import defined_at, exception_text


class Reward(Protocol):
    """A function of a task and a completion. If it raises, the verdict is REWARD_ERROR, not a reward of 0."""

    def __call__(self, task: Mapping[str, object], text: str, is_finished: bool) -> float | Mapping[str, float]:
        """Return the reward of `text`.

        `task` has `id`, `prompt`, `answer` and `metadata` (see nexrl.datasets). `text` is the completion without
        special tokens. `is_finished` is False if the limit on tokens ended the completion. A returned mapping has the
        reward under `reward`; its other entries are components, which are only reported.
        """
        ...


@dataclass(frozen=True)
class Score:
    """A reward and its reported components, all finite."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


class RewardFailedError(NexrlError):
    """The reward function raised, or returned a value that is not a reward."""


def load_reward(reference: str, folder: Path) -> Reward:
    """Return the reward function `module:function`, searched in `folder` first. Raises InvalidArgumentError."""
    reward = load_reference(reference, folder)
    if not is_a(reward, "a function"):
        raise InvalidArgumentError(f"{reference} is not a function but {type(reward).__name__}")
    return cast(Reward, reward)


def score(reward: Reward, task: Mapping[str, object], text: str, is_finished: bool) -> Score:
    """Call a reward function and check its result. Raises RewardFailedError."""
    try:
        returned = _entries(reward(task, text, is_finished))
        values = {name: float(value) for name, value in returned.items() if not isinstance(value, str | bytes)}
    except USER_CODE_ERRORS as error:
        raise RewardFailedError(
            f"reward of task {task.get('id')}: {exception_text(error, defined_at(reward))}"
        ) from error
    if "reward" not in values or len(values) < len(returned) or not all(map(math.isfinite, values.values())):
        name = getattr(reward, "__qualname__", type(reward).__name__)
        raise RewardFailedError(
            f"reward of task {task.get('id')}: {name} ({defined_at(reward)}) returned {dict(returned)}; "
            "use finite numbers, one of them named reward"
        )
    return Score(values.pop("reward"), values)


def exact_match(task: Mapping[str, object], text: str, is_finished: bool) -> float:
    """Return 1 if the policy ended the completion and it equals the answer, up to outer white space; else 0."""
    return float(is_finished and text.strip() == str(task["answer"]).strip())


def last_number(task: Mapping[str, object], text: str, is_finished: bool) -> float:
    """Return 1 if the last number in the completion equals the answer, finished or not; else 0."""
    numbers = _numbers(text)
    return float(bool(numbers) and numbers[-1] == Decimal(str(task["answer"]).replace(",", "").strip()))


def math_answer(task: Mapping[str, object], text: str, is_finished: bool) -> float:
    r"""Return 1 if the final answer equals the task's, else 0. Two numbers are compared as numbers.

    The final answer is the content of the last `\boxed{...}`, else the text after the last `####`, else the last
    number.
    """
    answer, expected = _marked_answer(text), str(task["answer"])
    if answer is None:
        numbers = _numbers(text)
        answer = str(numbers[-1]) if numbers else ""
    return float(_canonical(answer) == _canonical(_marked_answer(expected) or expected))


def _entries(returned: object) -> Mapping[str, Any]:
    return returned if isinstance(returned, Mapping) else {"reward": returned}


# A minus is part of the number unless it subtracts: "5-3" has 5 and 3, "= -3" has -3.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:\.\d+)?")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number) for number in _NUMBER.findall(_THOUSANDS_COMMA.sub("", text))]


def _marked_answer(text: str) -> str | None:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, marked = text.rpartition("####")
    return marked if mark else None


def _last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, with balanced braces."""
    _, marker, rest = text.rpartition(r"\boxed{")
    depth = 1
    for position, character in enumerate(rest if marker else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:position]
    return None


def _canonical(answer: str) -> Decimal | str:
    compact = "".join(_THOUSANDS_COMMA.sub("", answer).split()).strip("$.")
    return Decimal(compact) if re.fullmatch(r"-?\d+(\.\d+)?", compact) else compact
