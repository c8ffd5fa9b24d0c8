"""Reading the ledger: counters, samples, payloads, the audit."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nexrl.errors import NotFoundError
from nexrl_trajectory_pool.ledger.audit import Audit, audit, live_rows, settled_rows
from nexrl_trajectory_pool.ledger.names import DROPPED, HISTORY_TASKS
from nexrl_trajectory_pool.ledger.records import SAMPLE_ID, FailedAttempt, LedgerState, SampleRecord
from nexrl_trajectory_pool.ledger.script import Moves


class Reading(Moves):
    """Reads the ledger and changes nothing."""

    @property
    def wake_channel(self) -> str:
        """The Redis channel to which every move publishes what may end a wait: tasks, batch, train, ended."""
        return self._key("wake")

    async def state(self) -> LedgerState:
        """Return all counters."""
        answer = await self._move("state")
        flat, failure = answer["meta"] or [], answer["last_failure"] or []
        counters = {k: int(v) for k, v in zip(flat[::2], flat[1::2], strict=True)}
        dropped = {k.removeprefix(DROPPED): v for k, v in counters.items() if k.startswith(DROPPED)}
        return LedgerState(
            counters=counters,
            dropped=dropped,
            credit=int(answer["credit"]),
            can_lease=answer["can_lease"],
            exhausted=answer["exhausted"],
            added_tasks=answer["added"],
            unprocessed_batches=answer["unprocessed"],
            queued_train_batches=answer["queued"],
            last_failure=FailedAttempt(**dict(zip(failure[::2], failure[1::2], strict=True))) if failure else None,
        )

    async def cursor(self) -> int:
        """Return the position of the next task of the data."""
        return int(await self._redis.hget(self._key("meta"), "cursor") or 0)

    async def task_rewards(self, names: Sequence[str]) -> list[float | None]:
        """Return the mean reward of the newest grant of each task of the data; None if none has ended with a reward."""
        found = await self._redis.hmget(self._key("task_rewards"), list(names)) if names else []
        return [None if reward is None else float(reward) for reward in found]

    async def produced(self) -> list[bytes]:
        """Return the payloads of all produced samples (of a validation round, which forms no batches)."""
        state = await self.state()
        pipeline = self._redis.pipeline(transaction=False)
        for task in await self._task_ids(state["first_task"], state["next_task"] - 1):
            pipeline.hvals(self._key("payloads", task))
        return [payload for values in await pipeline.execute() for payload in values]

    async def sample(self, sample_id: str) -> tuple[SampleRecord, bytes | None]:
        """Return what is known of a sample, and its payload while it is held. Raises NotFoundError."""
        if not SAMPLE_ID.fullmatch(sample_id):
            raise NotFoundError(f"sample_id: {sample_id!r}; must be a sample id, for example '17.0'")
        task, _, k = sample_id.partition(".")
        records = await self._records([task])
        found = next((record for record in records if record.sample_id == sample_id), None)
        if found is None:
            raise NotFoundError(f"sample_id: {sample_id!r}: no such sample was granted")
        payload: Any = await self._redis.hget(self._key("payloads", task), k)
        return found, payload

    async def samples(self, first_task: int, most: int) -> tuple[list[SampleRecord], int | None]:
        """Return records of samples from task number `first_task` on, `most` or a task more; and the next number."""
        records: list[SampleRecord] = []
        while len(records) < most:
            last = first_task + math.ceil((most - len(records)) / self.rules.samples_per_task) - 1
            tasks = await self._task_ids(first_task, last)
            if not tasks:
                return records, None
            records += await self._records(tasks)
            first_task += len(tasks)
        return records, first_task

    async def audit(self) -> Audit:
        """Count everything again from its records; return what contradicts what."""
        history = await self._history()
        settled = set(history)
        answer = await self._move("task_ids", first=0, last=2**53)
        live = [task for task in answer["tasks"] or () if task not in settled]
        snapshot = await self._move("snapshot", tasks=live, first=answer["next_task"])
        # A task that has settled between the two reads is in neither. Its record is there now, and never changes.
        last = int(snapshot["meta"][snapshot["meta"].index("next_task") + 1]) - 1 if answer["next_task"] else -1
        live += await self._task_ids(answer["next_task"], last)
        missed = set(live) - {task[0] for task in snapshot["tasks"] or ()}
        history |= await self._history(missed)
        return audit(snapshot, history)

    async def _records(self, tasks: Sequence[str]) -> list[SampleRecord]:
        """Two reads, the living rows first: a task that settles in between is found by the second."""
        pipeline = self._redis.pipeline(transaction=False)
        for task in tasks:
            pipeline.hgetall(self._key("task", task))
        rows = dict(zip(tasks, await pipeline.execute(), strict=True))
        history = await self._history([task for task in tasks if not rows[task]])
        state = await self.state()
        dropped = await self._dropped_batches()
        found = {task: live_rows(rows[task]) for task in tasks if rows[task]}
        found |= {task: settled_rows(record) for task, record in history.items()}
        return [
            _record(f"{task}.{k}", row, state, dropped) for task in tasks for k, row in enumerate(found.get(task, ()))
        ]

    async def _dropped_batches(self) -> dict[int, str]:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hgetall(self._key("dropped_batches"))
        (found,) = await pipeline.execute()
        return {int(batch): reason.decode() for batch, reason in found.items()}

    async def _task_ids(self, first: int, last: int) -> list[str]:
        return (await self._move("task_ids", first=first, last=last))["tasks"] or []

    async def _history(self, tasks: Collection[str] | None = None) -> dict[str, str]:
        """Return where the samples of settled tasks went, by task; of all if `tasks` is None."""
        if tasks is None:
            next_task = (await self.state())["next_task"]
            numbers = list(range(next_task // HISTORY_TASKS + 1))
        else:
            numbers = sorted({int(task.partition("-")[0]) // HISTORY_TASKS for task in tasks})
        pipeline = self._redis.pipeline(transaction=False)
        for number in numbers:
            pipeline.hgetall(self._key("history", number))
        found = {k.decode(): v.decode() for packed in await pipeline.execute() for k, v in packed.items()}
        return found if tasks is None else {task: found[task] for task in tasks if task in found}


def _record(sample_id: str, row: str, state: LedgerState, dropped_batches: Mapping[int, str]) -> SampleRecord:
    """Return the record of a row "state:attempt:failures", or of a state alone."""
    name, _, rest = row.partition(":")
    attempt = int(rest.partition(":")[0] or 0)
    if name.startswith("-"):
        return SampleRecord(sample_id, "dropped", attempt, drop_reason=name[1:])
    if not name[1:].isdecimal():
        return SampleRecord(sample_id, name, attempt)
    batch = int(name[1:])
    if batch in dropped_batches:
        return SampleRecord(sample_id, "dropped", attempt, batch, dropped_batches[batch])
    reached = (
        "durable" if batch < state["durable_steps"] else "trained" if batch < state["trained_steps"] else "batched"
    )
    return SampleRecord(sample_id, reached, attempt, batch)
