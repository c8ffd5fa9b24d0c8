"""The task of the end-to-end tests: repeat three digits. It is learned from random weights in seconds."""

import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path

PROMPTS = tuple("".join(digits) for digits in product("01234", repeat=3))
HOLD = Path(__file__).with_name("hold")
"""While this file exists, no sample is scored. A test can then examine a run in which every process waits."""


def tasks(split: str) -> list[dict[str, str]]:
    """All prompts of three digits but every eighth; for validation, just those."""
    chosen = [prompt for number, prompt in enumerate(PROMPTS) if (number % 8 == 0) == (split == "validation")]
    return [{"prompt": f"{prompt}=", "answer": prompt} for prompt in chosen]


def reward(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
    """Share of characters in place, halved if the policy did not end the completion; `exact`: all is right."""
    while HOLD.exists():
        time.sleep(0.02)
    answer = str(task["answer"])
    share = sum(map(str.__eq__, text, answer)) / max(len(text), len(answer))
    return {"reward": share if is_finished else share / 2, "exact": float(is_finished and text == answer)}


def slow_reward(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
    """The same after 20 ms, as a slow environment would take on every machine."""
    time.sleep(0.02)
    return reward(task, text, is_finished)


def numbers_to_guess(split: str) -> list[dict[str, str]]:
    """Tasks of nexrl_rollout.environments.number_guess: one digit each."""
    return [{"prompt": "?", "answer": str(number)} for number in range(5)]
