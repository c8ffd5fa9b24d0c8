"""Moves of train batches: stored, leased, acknowledged, dropped, deleted with a checkpoint."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from nexrl.errors import LeaseLostError
from nexrl_trajectory_pool.ledger.script import Moves

PIECE_BYTES = 2**26
"""Bytes of one piece of a train batch. Redis accepts half a GiB in a command, and must answer others meanwhile."""

STAGED_SECONDS = 3600
"""After it the pieces of a train batch that was never put are deleted."""


class TrainBatches(Moves):
    """Moves of train batches."""

    async def put_train_batch(
        self, request_id: str, batch: int, attempt: int, sample_ids: Sequence[str], payload: bytes, put_id: str = ""
    ) -> None:
        """Store a train batch, which `put_id` names, and acknowledge its batch, which holds `sample_ids`.

        Raises LeaseLostError if the lease is not held, or if the ledger's batch of that number holds other samples.
        """
        pieces = [payload[i : i + PIECE_BYTES] for i in range(0, len(payload), PIECE_BYTES)] or [b""]
        staged = self._key("train_batch", f"{batch}:{uuid4().hex}")
        for number, piece in enumerate(pieces[:-1]):
            await self._stage(staged, number, piece)
        await self._move(
            "put_train_batch",
            request_id,
            pieces[-1],
            batch=batch,
            attempt=attempt,
            ids=" ".join(sample_ids),
            put_id=put_id,
            staged=staged.removeprefix(self._prefix),
            pieces=len(pieces),
            bytes=len(payload),
        )

    async def lease_train_batch(self, step: int, incarnation: int) -> tuple[bytes | None, bool]:
        """Return the train batch of `step`, and True if no further one can follow. Raises LeaseLostError."""
        answer = await self._move("lease_train_batch", step=step, incarnation=incarnation)
        pieces = [await self._piece(step, number) for number in range(answer["pieces"])]
        return b"".join(pieces) if pieces else None, answer["exhausted"]

    async def ack_train_batch(self, step: int, incarnation: int, sample_ids: Sequence[str], put_id: str = "") -> bool:
        """Count the samples of `step` as trained, once; return True if a checkpoint is wanted, to make room.

        Raises LeaseLostError if a newer trainer has taken over, or if the ledger has another step next or another train
        batch for it: then it has lost writes, and the trainer must resume from a checkpoint.
        """
        ids = " ".join(sample_ids)
        answer = await self._move("ack_train_batch", step=step, incarnation=incarnation, ids=ids, put_id=put_id)
        return bool(answer.get("checkpoint_wanted"))

    async def fail_train_batch(
        self, request_id: str, step: int, incarnation: int, sample_ids: Sequence[str], put_id: str, emptied: bytes
    ) -> bool | None:
        """Count a failure of training `step`; return True if its train batch is dropped now.

        `emptied`, a train batch that trains nothing and that `request_id` names, takes the place of a dropped one. If
        it is needed and b"", nothing changes and the answer is None. Raises LeaseLostError as `ack_train_batch`.
        """
        answer = await self._move(
            "fail_train_batch",
            request_id,
            emptied,
            step=step,
            incarnation=incarnation,
            ids=" ".join(sample_ids),
            put_id=put_id,
            new_put_id=request_id,
        )
        is_dropped: bool | None = answer.get("dropped")
        return is_dropped

    async def commit_checkpoint(self, steps: int, incarnation: int) -> None:
        """Delete the train batches of the first `steps` steps.

        Raises LeaseLostError if a newer trainer has taken over.
        """
        await self._move("commit_checkpoint", steps=steps, incarnation=incarnation)

    async def resume(self, request_id: str, steps: int, data_cursor: int) -> tuple[int, int]:
        """Begin a trainer after `steps` steps; return its incarnation and how many steps it replays.

        Raises FailedPreconditionError if the train batches from there on are gone.
        """
        answer = await self._move("resume", request_id, steps=steps, cursor=data_cursor)
        return answer["incarnation"], answer["replayed"]

    async def _stage(self, key: str, number: int, piece: bytes) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(key, str(number), piece)
        pipeline.expire(key, STAGED_SECONDS)
        await pipeline.execute()

    async def _piece(self, step: int, number: int) -> bytes:
        piece: Any = await self._redis.hget(self._key("train_batch", step), str(number))
        if piece is None:
            raise LeaseLostError(f"step {step}: its train batch is gone; a committed checkpoint contains it")
        return bytes(piece)
