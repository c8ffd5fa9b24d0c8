"""The task of this example: a prompt is four digits, the completion should be the same digits in ascending order."""

import random
from collections.abc import Mapping

HELD_OUT = frozenset(random.Random(12345).sample([f"{number:04d}" for number in range(10_000)], 256))


def tasks(split: str) -> list[dict[str, str]]:
    """All four-digit prompts but the 256 held out; for validation, just those."""
    return [
        {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}
        for digits in (f"{number:04d}" for number in range(10_000))
        if (digits in HELD_OUT) == (split == "validation")
    ]


def reward(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
    """Share of characters in the right place, halved if the policy did not end the completion; `exact`: all is right.

    A random policy has a digit in place now and then, so it learns from the first step; an exact match it never has.
    """
    answer = str(task["answer"])
    in_place = sum(given == expected for given, expected in zip(text, answer, strict=False))
    share = in_place / max(len(text), len(answer))
    return {"reward": share if is_finished else share / 2, "exact": float(is_finished and text == answer)}
