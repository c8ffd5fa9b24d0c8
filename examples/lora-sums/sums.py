"""The task of this example: a prompt is a sum of two numbers below 50, the completion should be the result alone."""

import random
from collections.abc import Mapping

PROMPTS = random.Random(0).sample([(first, second) for first in range(50) for second in range(50)], 1200)


def tasks(split: str) -> list[dict[str, str]]:
    """1,000 sums to train on; for validation, 200 others."""
    chosen = PROMPTS[1000:] if split == "validation" else PROMPTS[:1000]
    return [{"prompt": f"What is {first} + {second}?", "answer": str(first + second)} for first, second in chosen]


def reward(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
    """1 for the right number alone, half of it if something follows or precedes it."""
    answer = str(task["answer"])
    exact = float(is_finished and text.strip() == answer)
    return {"reward": max(exact, 0.5 * (answer in text.split())), "exact": exact}
