"""All ranks of a trainer, as rank 0 sees them: it starts them, watches them, and ends them all if one of them ends."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from nexrl.errors import NexrlError, explain_exit
from nexrl.weights.transport import cloned
from nexrl_trainer.interface import local_address
from nexrl_trainer.rank_processes import Member, RankEnd, end_all, end_process, first_end
from nexrl_trainer.ranks import Ranks, join_ranks

log = logging.getLogger(__name__)

NOTICE_SECONDS = 5.0
"""Time in which the main processes notice that a rank has ended, and end them all."""


@dataclass(frozen=True)
class Gang:
    """The other ranks, and the store in which all ranks meet."""

    store: TCPStore
    host: str
    """The address at which the store listens."""
    size: int
    """Ranks of the trainer, rank 0 included."""
    members: Sequence[Member]
    """The other ranks of this replica, and the other replicas."""

    def join(self, device: torch.device) -> Ranks:
        """Join the ranks as rank 0, with this device. Blocks until the other ranks have joined."""
        return join_ranks(0, self.size, device, self.store, local_address(self.host, self.store.port))

    async def watch(self) -> None:
        """Wait until a rank ends. Then end this process at once, and so all ranks, in the way that rank ended.

        The ranks that still run wait for the one that is gone, so nothing can be finished or saved.
        """
        first = await first_end(self.members)
        code, reason = first.exit_code or 1, self._reason(first)  # a rank never ends by itself without an error
        await self.end(code, reason)  # or the others would complain of each other after the true reason
        log.critical("%s", reason)
        end_process(code)

    async def end(self, exit_code: int = 0, reason: str = "rank 0 of the trainer has ended") -> None:
        """End the other ranks, which hold nothing that is not in a checkpoint or in the ledger."""
        await end_all(self.members, exit_code, reason)

    def _reason(self, end: RankEnd) -> str:
        if end.lost:
            return end.lost
        store, key = cloned(self.store), reason_key(end.rank)  # `join` may hold the connection
        left = f": {store.get(key).decode()}" if store.check([key]) else explain_exit(end.exit_code)
        return f"rank {end.rank} of the trainer ended with code {end.exit_code}{left}"


def reason_key(rank: int) -> str:
    """Return the key of the store under which a rank leaves why it ends."""
    return f"reason/{rank}"


def end_for(error: BaseException) -> NoReturn:
    """Log the error and end this process at once, with the error's exit code."""
    if isinstance(error, NexrlError):
        log.critical("%s", error)
        end_process(error.exit_code)
    log.critical("crashed", exc_info=error)
    end_process(1)


@contextmanager
def wait_for_gang_end() -> Iterator[None]:
    """After an error of a collective, wait until this process is ended. Raise the error if it is not.

    The reason of such an error is mostly that another rank has ended. Rank 0 then ends all with that rank's code.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(NOTICE_SECONDS)
        raise
