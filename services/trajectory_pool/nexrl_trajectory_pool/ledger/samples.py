"""Moves of samples: granted, renewed, returned, produced."""

from collections.abc import Sequence

from nexrl_trajectory_pool.ledger.records import Drawn, Grant, GrantedTask, ProducedSample
from nexrl_trajectory_pool.ledger.script import Moves


class Samples(Moves):
    """Moves of samples and their tasks."""

    async def lease_tasks(
        self, request_id: str, max_samples: int, lease_seconds: float, drawn: Drawn | None = None
    ) -> Grant:
        """Grant up to `max_samples`: first samples that are open again, then new tasks within the credit.

        With `drawn`, only tasks that were drawn are granted. If that is none, the grant is waiting on "draw".
        """
        draw = {} if drawn is None else {"drawn": {"first": drawn.first, "names": drawn.names}}
        answer = await self._move(
            "lease_tasks", request_id, max_samples=max_samples, lease_seconds=lease_seconds, **draw
        )
        tasks = tuple(
            GrantedTask(t["task"], t["pos"], t["item"].encode(), tuple((s[0], s[1]) for s in t["samples"]))
            for t in answer.get("leases", ())
        )
        return Grant(tasks, answer.get("deadline", 0.0), answer.get("waiting_on", ""), answer.get("exhausted", False))

    async def renew(self, samples: Sequence[tuple[str, int]], lease_seconds: float) -> tuple[str, ...]:
        """Move the deadlines of leases that are still held; return the ids of those that are not."""
        answer = await self._move("renew", samples=samples, lease_seconds=lease_seconds)
        return tuple(answer["lost"])

    async def return_samples(self, request_id: str, samples: Sequence[tuple[str, int]]) -> int:
        """Make samples that were not attempted open again. Return how many of the leases were still held."""
        return int((await self._move("return_samples", request_id, samples=samples))["returned"])

    async def add_task(self, request_id: str, item: bytes, *, front: bool) -> None:
        """Queue a task ahead of the data set. Raises ResourceExhaustedError if too much is held already."""
        await self._move("add_task", request_id, item, front=front)

    async def reset(self, request_id: str) -> None:
        """Start the data set again."""
        await self._move("reset", request_id)

    async def put_samples(
        self, request_id: str, results: Sequence[ProducedSample], worker: str = ""
    ) -> tuple[str, ...]:
        """Store results of `worker`; return ACCEPTED, DUPLICATE, FENCED or RETRIED for each.

        Raises ResourceExhaustedError if `max_payload_bytes` would be exceeded, InvalidArgumentError if a result names a
        policy version that was never committed, UnavailableError if Redis may have forgotten that version. Nothing is
        stored then.
        """
        rows = [
            {"id": r.sample_id, "attempt": r.attempt, "oldest": r.oldest_version, "newest": r.newest_version}
            | ({"failure": r.failure, "error": r.error} if r.failure else {})
            | ({"group": r.group, "reward": r.reward} if r.group else {})
            for r in results
        ]
        answer = await self._move("put_samples", request_id, *(r.payload for r in results), results=rows, worker=worker)
        return tuple(answer["outcomes"])

    async def expire(self) -> float | None:
        """Requeue samples whose lease has expired. Return the seconds until the next lease expires."""
        due_in = (await self._move("expire"))["due_in"]
        return None if due_in < 0 else float(due_in)
