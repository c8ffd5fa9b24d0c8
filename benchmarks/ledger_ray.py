"""Ray's half of `ledger.py`: a plain pool in memory, an actor, with as many producers and the same payloads.

Runs in a virtual environment of its own (.venv-ray) and imports nothing of nexrl; prints trajectories per second as
JSON. The pool does what such pools do and no more: no lease, no checks, no log, no record of what became of a sample.
"""

import argparse
import json
import logging
import os
import time
from collections import defaultdict, deque

import ray

GROUP_SIZE = 8
BATCH_SIZE = 64
PAYLOAD_BYTES = 8192
WARM_UP_BATCHES = 20
WAIT_SECONDS = 0.002


class Pool:
    """Groups of trajectories in a dictionary of lists; complete ones in a queue."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, list[bytes]] = defaultdict(list)
        self._ready: deque[list[bytes]] = deque()
        self._leased: dict[int, list[bytes]] = {}
        self._batches = 0

    def put(self, group: str, payload: bytes) -> None:
        """Add one trajectory."""
        self._groups[group].append(payload)
        if len(self._groups[group]) == GROUP_SIZE:
            self._ready.append(self._groups.pop(group))

    def put_group(self, group: str, payloads: list[bytes]) -> None:
        """Add all trajectories of a group."""
        for payload in payloads:
            self.put(group, payload)

    def get_batch(self) -> tuple[int, list[bytes]] | None:
        """A batch and its number; None while there are too few groups."""
        if len(self._ready) * GROUP_SIZE < BATCH_SIZE:
            return None
        batch = [payload for _ in range(BATCH_SIZE // GROUP_SIZE) for payload in self._ready.popleft()]
        self._batches += 1
        self._leased[self._batches] = batch
        return self._batches, batch

    def ack(self, number: int) -> None:
        """Forget a batch."""
        del self._leased[number]


class Producer:
    """One client process that puts groups, one after the other."""

    def run(self, pool: "ray.actor.ActorHandle", number: int, groups: int, is_whole: bool) -> None:
        """Put `groups` groups, each with one call or with one call per trajectory."""
        payload = os.urandom(PAYLOAD_BYTES)
        for n in range(groups):
            group = f"{number}:{n}"
            if is_whole:
                ray.get(pool.put_group.remote(group, [payload] * GROUP_SIZE))
            else:
                ray.get([pool.put.remote(group, payload) for _ in range(GROUP_SIZE)])


class Consumer:
    """One client process that takes batches."""

    def run(self, pool: "ray.actor.ActorHandle", batches: int) -> list[float]:
        """Take and acknowledge `batches`; returns the time of each (seconds). The next is requested ahead of time."""
        times: list[float] = []
        asked = pool.get_batch.remote()
        while len(times) < batches:
            found = ray.get(asked)
            asked = pool.get_batch.remote()
            if found is None:
                time.sleep(WAIT_SECONDS)
                continue
            number, batch = found
            assert len(batch) == BATCH_SIZE
            pool.ack.remote(number)
            times.append(time.perf_counter())
        return times


def main() -> None:
    """Measure both ways to put."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--producers", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.producers + 2, include_dashboard=False, logging_level=logging.ERROR)
    found = {
        name: rate(arguments.producers, arguments.batches, is_whole)
        for name, is_whole in (("call_per_trajectory", False), ("call_per_group", True))
    }
    ray.shutdown()
    print(json.dumps(found))


def rate(producers: int, batches: int, is_whole: bool) -> float:
    """Trajectories per second, without the beginning and the end."""
    groups = batches * BATCH_SIZE // GROUP_SIZE // producers
    pool, consumer = ray.remote(Pool).remote(), ray.remote(Consumer).remote()
    workers = [ray.remote(Producer).remote() for _ in range(producers)]
    puts = [worker.run.remote(pool, number, groups, is_whole) for number, worker in enumerate(workers)]
    times: list[float] = ray.get(consumer.run.remote(pool, groups * producers * GROUP_SIZE // BATCH_SIZE))
    ray.get(puts)
    skipped = min(WARM_UP_BATCHES, len(times) // 4)
    kept = times[skipped : len(times) - skipped]
    for actor in (pool, consumer, *workers):
        ray.kill(actor)
    return BATCH_SIZE * (len(kept) - 1) / (kept[-1] - kept[0])


if __name__ == "__main__":
    main()
