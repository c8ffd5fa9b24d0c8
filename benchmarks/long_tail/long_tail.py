"""The task of `async_vs_sync.py`: repeat one digit. An episode lasts as long as a log-normal draw says.

The policy answers at once and the episode ends late, as if it had gone on generating: what it trains is as old as its
first token is. Nothing is computed meanwhile, so that no machine is too slow for it.
"""

import asyncio
import math
import random

import aiohttp

from nexrl.environment import Endpoint, Outcome, Task

MEDIAN_SECONDS = 0.1
SIGMA = 1.2
"""Of 64 episodes the longest is expected to take 18 times the median, the mean episode 2 times."""


def tasks(split: str) -> list[dict[str, str]]:
    """Five prompts of one digit each."""
    return [{"prompt": f"{digit}=", "answer": digit} for digit in "01234"]


class LongTail:
    """One question, one answer, and a wait."""

    def __init__(self) -> None:
        self._durations = random.Random(0)

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """One episode. Reward: the share of characters in place; `seconds`: how long it was."""
        seconds = self._durations.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA)
        async with asyncio.TaskGroup() as both:
            both.create_task(asyncio.sleep(seconds))
            text = both.create_task(_completion(task, endpoint))
        answer = str(task.item["answer"])
        share = sum(map(str.__eq__, text.result(), answer)) / max(len(text.result()), len(answer))
        return Outcome("ok", share, {"seconds": seconds})


async def _completion(task: Task, endpoint: Endpoint) -> str:
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": task.item["prompt"]}]}
    url = f"{endpoint.base_url}/chat/completions"
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.post(url, json=body) as response:
        return str((await response.json())["choices"][0]["message"]["content"] or "")
