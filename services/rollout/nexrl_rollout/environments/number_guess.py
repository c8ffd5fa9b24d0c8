"""Guess a number from hints: the smallest environment with several turns."""

import re

from nexrl.environment import ChatLoop, Task, Turn

MAX_TURNS = 4
_NUMBER = re.compile(r"\d+")


def number_guess() -> ChatLoop:
    """For `rollout.environment: nexrl_rollout.environments.number_guess:number_guess`. The task's answer is the
    number."""
    return ChatLoop(NumberGuess, max_turns=MAX_TURNS)


class NumberGuess:
    """The prompt opens; each guess is answered with `higher` or `lower`; the reward is 1 for the first guess, less for
    later ones."""

    def __init__(self) -> None:
        self._secret = 0
        self._guesses = 0

    async def reset(self, task: Task) -> Turn:
        """Take the number from the task."""
        self._secret = int(task.item["answer"])
        return Turn([{"role": "user", "content": task.item["prompt"]}])

    async def step(self, reply: str) -> Turn:
        """Compare the first number of the reply."""
        self._guesses += 1
        found = _NUMBER.search(reply)
        if found is None:
            return _hint("a number")
        guess = int(found.group())
        if guess == self._secret:
            return Turn(reward=1 / self._guesses, components={"guesses": self._guesses}, is_over=True)
        return _hint("higher" if guess < self._secret else "lower")

    async def close(self) -> None:
        """Nothing is held."""


def _hint(text: str) -> Turn:
    return Turn([{"role": "user", "content": text}])
