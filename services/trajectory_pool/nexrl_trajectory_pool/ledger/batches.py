"""Moves of batches: formed, leased, returned."""

from collections import defaultdict
from collections.abc import Sequence

from nexrl.errors import InvalidArgumentError, LeaseLostError
from nexrl_trajectory_pool.ledger import names
from nexrl_trajectory_pool.ledger.records import GrantedBatch
from nexrl_trajectory_pool.ledger.script import Moves


class Batches(Moves):
    """Moves of batches."""

    async def lease_batch(
        self, request_id: str, lease_seconds: float, batch_size: int = 0, worker: str = ""
    ) -> tuple[GrantedBatch | None, bool]:
        """Lease the oldest unacknowledged batch. If there is none, form the next, of `batch_size` samples if not 0.

        If a batch is already leased to `worker`, it is leased to it again, because a worker asks only without a batch.
        Also returns True if no further batch can follow. Raises LeaseLostError if the batch was trained meanwhile, for
        example because a request is repeated very late.
        """
        size = {"size": batch_size} if batch_size else {}
        answer = await self._move("lease_batch", request_id, lease_seconds=lease_seconds, worker=worker, **size)
        if "batch" not in answer:
            return None, answer["exhausted"]
        if answer["bytes"] > names.MAX_BATCH_BYTES:  # a single group: others end a batch
            raise InvalidArgumentError(
                f"trajectoryPool.batchSize: batch {answer['batch']} has {answer['bytes']} bytes of trajectories; "
                f"at most {names.MAX_BATCH_BYTES}: choose a smaller one"
            )
        sample_ids = tuple(sample for g in answer["groups"] for sample in g["samples"])
        payloads = await self._payloads(sample_ids)
        if None in payloads.values():
            raise LeaseLostError(f"batch {answer['batch']}: the lease was lost")
        groups = tuple((g["name"], tuple(payloads[sample] for sample in g["samples"])) for g in answer["groups"])
        granted = GrantedBatch(
            answer["batch"], answer["attempt"], groups, sample_ids, answer["cursor"], answer["refilled"]
        )
        return granted, False

    async def return_batch(self, request_id: str, batch: int, attempt: int) -> None:
        """Return a leased batch. Raises LeaseLostError if the lease is not held."""
        await self._move("return_batch", request_id, batch=batch, attempt=attempt)

    async def _payloads(self, sample_ids: Sequence[str]) -> dict[str, bytes]:
        by_task: defaultdict[str, list[str]] = defaultdict(list)
        for sample_id in sample_ids:
            task, _, k = sample_id.partition(".")
            by_task[task].append(k)
        pipeline = self._redis.pipeline(transaction=False)
        for task, ks in by_task.items():
            pipeline.hmget(self._key("payloads", task), ks)
        found = zip(by_task.items(), await pipeline.execute(), strict=True)
        return {f"{task}.{k}": payload for (task, ks), values in found for k, payload in zip(ks, values, strict=True)}
