"""The processes of the other ranks of a trainer, as its main process, rank 0, has them.

They share its process group and its output, and end with it. If one of them ends, all end, for that rank's reason.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import TCPStore

from nexrl import parent_death
from nexrl.errors import explain_exit
from nexrl.weights.transport import cloned, listening_store
from nexrl_trainer.ranks import Ranks, join_ranks

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RANK, SIZE, RENDEZVOUS_PORT = "NEXRL_RANK", "NEXRL_RANKS", "NEXRL_RENDEZVOUS_PORT"
"""Variables of the other ranks' processes."""


@dataclass(frozen=True)
class Gang:
    """The started processes of ranks 1, 2, …, and the store in which all ranks meet."""

    store: TCPStore
    processes: Sequence[asyncio.subprocess.Process]

    def join(self, device: torch.device) -> Ranks:
        """Join the ranks as rank 0, with this device. Blocks until the other ranks have joined."""
        return join_ranks(0, 1 + len(self.processes), device, self.store)

    async def watch(self) -> None:
        """Wait until a rank ends. Then end this process at once, and so all ranks, in the way that rank ended.

        The ranks that still run wait for the one that is gone, so nothing can be finished or saved.
        """
        ends = {asyncio.create_task(process.wait()): process for process in self.processes}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        rank, code = next((rank, p.returncode) for rank, p in enumerate(self.processes, 1) if p.returncode is not None)
        await self.end()  # or the others would complain of each other after the true reason
        log.critical("rank %d of the trainer ended with code %d%s", rank, code, self._reason(rank, code))
        _end_like(code)

    async def end(self) -> None:
        """Kill the other ranks, which hold nothing that is not in a checkpoint or in the ledger."""
        for process in self.processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in self.processes))

    def _reason(self, rank: int, code: int) -> str:
        store, key = cloned(self.store), reason_key(rank)  # `join` may hold the connection
        return f": {store.get(key).decode()}" if store.check([key]) else explain_exit(code)


async def start_gang(size: int, instance: str) -> Gang:
    """Start the processes of ranks 1 to `size` - 1 of the trainer `instance`."""
    store = listening_store(LOOPBACK)
    return Gang(store, [await _start(rank, size, instance, store.port) for rank in range(1, size)])


def reason_key(rank: int) -> str:
    """Return the key of the store under which a rank leaves why it ends."""
    return f"reason/{rank}"


async def _start(rank: int, size: int, instance: str, port: int) -> asyncio.subprocess.Process:
    own = {RANK: str(rank), SIZE: str(size), RENDEZVOUS_PORT: str(port), "NEXRL_INSTANCE": f"{instance}-rank-{rank}"}
    # The child inherits that SIGTERM is blocked: one that comes while it imports waits until it can be passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
            *(sys.executable, "-m", "nexrl_trainer.follower"),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **own},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_like(code: int) -> None:
    """End this process at once with the exit code, or by the signal, that a rank ended with."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code or 1)  # a rank never ends by itself without an error
