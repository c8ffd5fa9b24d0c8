"""A rollout worker in a process of its own, outside of NexRL: it feeds a running experiment through gRPC alone.

A worker inside of NexRL's rollout processes needs less: `rollout.type: worker`, see nexrl.rollout_worker.

    python examples/custom_rollout_worker.py POOL_HOST:PORT WEIGHT_SYNC_HOST:PORT ALPHABET

`nexrl status runs/NAME` prints both addresses; runs/NAME/endpoints.json has them while the run is running. ALPHABET is
that of the experiment's scratch model. The reward here is the share of characters that are right.
"""

import asyncio
import json
import sys

from nexrl.client import open_rollout_client
from nexrl.errors import DeadlineExceededError, UnavailableError
from nexrl.policy import Sampling
from nexrl.rollout_worker import scored
from nexrl.transcript import Transcript

BOS, EOS, FIRST_CHARACTER = 1, 2, 4
GENERATE_SECONDS = 30.0
"""Longest wait for an engine. After it the samples' leases run out, and other workers get the samples."""


async def main(pool: str, weight_sync: str, alphabet: str) -> None:
    """Work until the data is exhausted, or the pool is unreachable for longer than a restart takes."""
    try:
        await work(pool, weight_sync, alphabet)
    except (UnavailableError, DeadlineExceededError) as error:
        sys.stderr.write(f"the run is over: {error}\n")


async def work(pool: str, weight_sync: str, alphabet: str) -> None:
    """Lease, generate, score, put, until the data is exhausted. Raises UnavailableError when the pool is gone."""
    async with open_rollout_client(pool, weight_sync, worker_id="custom-0") as client:
        async for lease in client.leases(max_samples=16):
            task = json.loads(lease.task.item_json)
            prompt_ids = [BOS, *(FIRST_CHARACTER + alphabet.index(character) for character in task["prompt"])]
            sampling = Sampling.of(lease, max_new_tokens=len(task["answer"]) + 1)
            try:
                completions = await client.policy.generate(
                    prompt_ids, len(lease.samples), sampling, timeout_seconds=GENERATE_SECONDS
                )
            except (UnavailableError, DeadlineExceededError):
                continue
            results = []
            for sample, completion in zip(lease.samples, completions, strict=True):
                text = "".join(alphabet[i - FIRST_CHARACTER] for i in completion.token_ids if i >= FIRST_CHARACTER)
                reward = sum(map(str.__eq__, text, task["answer"])) / len(task["answer"])
                transcript = Transcript(prompt_ids)
                transcript.add_completion(completion)
                trajectory = transcript.trajectory(reward, metadata={"task_id": lease.task.task_id}, response=text)
                results.append(scored(sample, [trajectory], completion.finish_reason))
            await client.put(lease.purpose, results)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
