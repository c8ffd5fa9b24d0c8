"""Helpers that make ledger tests short."""

from collections.abc import Mapping

from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool.ledger import UNLIMITED, Grant, Ledger, LedgerRules, ProducedSample
from tests.support.clock import Clock


def rules(**changes: object) -> LedgerRules:
    """Return rules with batches of 4 samples in groups of 2, strictly on-policy. Keywords change them."""
    values: dict[str, object] = {
        "batch_size": 4,
        "group_size": 2,
        "samples_per_task": 2,
        "positions": UNLIMITED,
        "staleness": 0,
        "scoped": True,
        "release_incomplete": True,
        "max_attempts": 2,
        "max_queued": 2,
    }
    return LedgerRules(**(values | changes))  # type: ignore[arg-type]


def produced(grant: Grant, version: int = 0, rewards: Mapping[str, str] | None = None) -> list[ProducedSample]:
    """Return a good result for every sample of a grant. Rewards differ, but for the samples that `rewards` names."""
    return [
        ProducedSample(
            sample,
            attempt,
            None,
            task.task,
            version,
            f"payload-{sample}".encode(),
            reward=(rewards or {}).get(sample, sample),
        )
        for task in grant.tasks
        for sample, attempt in task.samples
    ]


async def fill_batch(ledger: Ledger, version: int = 0) -> None:
    """Lease and produce all samples that the credit allows."""
    while (grant := await ledger.lease_tasks("", 64, 60)).tasks:
        await ledger.put_samples("", produced(grant, version))


class Make:
    """Builds ledgers that use the same keys in Redis."""

    def __init__(self, redis: Redis, name: str, clock: Clock) -> None:
        self._redis, self._prefix, self._clock = redis, key_prefix(name, "default"), clock

    def __call__(self, **changes: object) -> Ledger:
        return Ledger(self._redis, self._prefix, self.rules(**changes), self._clock)

    def rules(self, **changes: object) -> LedgerRules:
        return rules(**changes)


async def train(ledger: Ledger, incarnation: int, steps: range) -> list[str]:
    """Make these steps. Returns the first word of each step's train batch."""
    seen = []
    for step in steps:
        await ledger.set_version(step)
        await fill_batch(ledger, version=step)
        batch, _ = await ledger.lease_batch("", 60)
        if batch is not None:
            content = " ".join([f"train-{batch.batch}", *batch.sample_ids]).encode()
            await ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, content)
        found, _ = await ledger.lease_train_batch(step, incarnation)
        assert found is not None
        payload, *sample_ids = found.decode().split()
        await ledger.ack_train_batch(step, incarnation, sample_ids)
        await ledger.ack_train_batch(step, incarnation, sample_ids)
        seen.append(payload)
    return seen
