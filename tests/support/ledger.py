"""Short ways to write ledger tests."""

from nexrl_trajectory_pool.ledger import UNLIMITED, Grant, Ledger, LedgerRules, ProducedSample


def rules(**changes: object) -> LedgerRules:
    """Batches of 4 samples in groups of 2, strictly on-policy, unless told otherwise."""
    values: dict[str, object] = {
        "batch_size": 4,
        "leaf_size": 2,
        "samples_per_task": 2,
        "positions": UNLIMITED,
        "staleness": 0,
        "scoped": True,
        "release_incomplete": True,
        "max_attempts": 2,
        "max_queued": 2,
    }
    return LedgerRules(**(values | changes))  # type: ignore[arg-type]


def produced(grant: Grant, version: int = 0) -> list[ProducedSample]:
    """A good result for every sample of a grant."""
    return [
        ProducedSample(sample, attempt, None, task.group, version, f"payload-{sample}".encode())
        for task in grant.tasks
        for sample, attempt in task.samples
    ]


async def fill_batch(ledger: Ledger, version: int = 0) -> None:
    """Lease and produce everything that the credit allows."""
    while (grant := await ledger.lease_tasks("", 64, 60)).tasks:
        await ledger.put_samples("", produced(grant, version))
