"""Rewards of finished completions: the interface for functions of the user, and the ones that come with the project."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Protocol, cast

from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.references import load_reference


class Reward(Protocol):
    """A function of a task and a completion. If it raises, the verdict is REWARD_ERROR, and never a reward of 0."""

    def __call__(self, task: Mapping[str, object], text: str, is_finished: bool) -> float | Mapping[str, float]:
        """Reward of `text`.

        `task` has `id`, `prompt`, `answer` and `metadata` (see nexrl.datasets). `text` is the completion without
        special tokens. `is_finished` tells whether the policy ended it, rather than the limit on tokens. A mapping
        holds the reward under `reward`; its other entries are components that are only reported.
        """
        ...


@dataclass(frozen=True)
class Score:
    """A reward and its reported components, all finite."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


class RewardFailedError(NexrlError):
    """The reward function raised, or returned something that is no reward."""


def load_reward(reference: str, folder: Path) -> Reward:
    """The reward function at `module:function`, looked up in `folder` first. Raises InvalidArgumentError."""
    reward = load_reference(reference, folder)
    if not callable(reward):
        raise InvalidArgumentError(f"{reference} is not a function but {type(reward).__name__}")
    return cast(Reward, reward)


def score(reward: Reward, task: Mapping[str, object], text: str, is_finished: bool) -> Score:
    """Calls a reward function and checks what it returns. Raises RewardFailedError."""
    try:
        returned = reward(task, text, is_finished)
        values = {name: float(value) for name, value in _entries(returned).items()}
    except Exception as error:  # code of the user may raise anything; the cause is kept
        raise RewardFailedError(f"reward of task {task.get('id')}: {type(error).__name__}: {error}") from error
    if "reward" not in values or not all(math.isfinite(value) for value in values.values()):
        raise RewardFailedError(
            f"reward of task {task.get('id')}: finite numbers with one named reward are needed, not {values}"
        )
    return Score(values.pop("reward"), values)


def exact_match(task: Mapping[str, object], text: str, is_finished: bool) -> float:
    """1 if the completion was ended by the policy and is the answer, white space around it aside; else 0."""
    return float(is_finished and text.strip() == str(task["answer"]).strip())


def last_number(task: Mapping[str, object], text: str, is_finished: bool) -> float:
    """1 if the last number in the completion equals the answer, finished or not; else 0."""
    numbers = _numbers(text)
    return float(bool(numbers) and numbers[-1] == Decimal(str(task["answer"]).replace(",", "").strip()))


def math_answer(task: Mapping[str, object], text: str, is_finished: bool) -> float:
    r"""1 if the final answer equals the task's, as numbers where both are; else 0.

    The final answer is what the last `\boxed{...}` holds, else what follows the last `####`, else the last number.
    """
    answer, expected = _marked_answer(text), str(task["answer"])
    if answer is None:
        numbers = _numbers(text)
        answer = str(numbers[-1]) if numbers else ""
    return float(_canonical(answer) == _canonical(_marked_answer(expected) or expected))


def _entries(returned: object) -> Mapping[str, float]:
    return returned if isinstance(returned, Mapping) else {"reward": cast(float, returned)}


# A minus belongs to the number unless it subtracts: "5-3" holds 5 and 3, "= -3" holds -3.
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
    r"""Content of the last `\boxed{...}`, its braces balanced."""
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
