"""The task of the end-to-end tests: repeat three digits. It is learned from random weights in seconds."""

from collections.abc import Mapping
from itertools import product

PROMPTS = tuple("".join(digits) for digits in product("01234", repeat=3))


def tasks(split: str) -> list[dict[str, str]]:
    """All prompts of three digits but every eighth; for validation, just those."""
    chosen = [prompt for number, prompt in enumerate(PROMPTS) if (number % 8 == 0) == (split == "validation")]
    return [{"prompt": f"{prompt}=", "answer": prompt} for prompt in chosen]


def reward(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
    """Share of characters in the right place, halved if the policy did not end the completion; `exact`: all is right."""
    answer = str(task["answer"])
    share = sum(map(str.__eq__, text, answer)) / max(len(text), len(answer))
    return {"reward": share if is_finished else share / 2, "exact": float(is_finished and text == answer)}
