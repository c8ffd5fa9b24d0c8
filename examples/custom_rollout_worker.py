"""A rollout worker of one's own, outside of NexRL: it feeds a running experiment through gRPC alone.

    python examples/custom_rollout_worker.py POOL_HOST:PORT WEIGHT_SYNC_HOST:PORT ALPHABET

`nexrl status runs/NAME` tells both addresses, as does runs/NAME/endpoints.json while the run is on. ALPHABET is that of
the experiment's scratch model. The reward here is the share of characters that are right.
"""

import asyncio
import json
import sys

from nexrl.client import open_rollout_client
from nexrl.errors import DeadlineExceededError, UnavailableError
from nexrl.policy import Sampling
from nexrl.transcript import Transcript
from nexrl.v1.trajectory_pb2 import VERDICT_OK, SampleResult

BOS, EOS, FIRST_CHARACTER = 1, 2, 4
GENERATE_SECONDS = 30.0
"""Longest time without an engine: then the samples' leases lapse, and others sample them."""


async def main(pool: str, weight_sync: str, alphabet: str) -> None:
    """Work until the data is exhausted, or the pool has been away for longer than a restart takes: the run is over."""
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
            sampling = Sampling(max_new_tokens=len(task["answer"]) + 1, temperature=lease.temperature)
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
                result = SampleResult(sample_id=sample.sample_id, attempt=sample.attempt, verdict=VERDICT_OK)
                result.trajectories.append(trajectory)
                results.append(result)
            await client.put(lease.purpose, results)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
