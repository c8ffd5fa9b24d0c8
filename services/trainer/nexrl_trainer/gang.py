"""Starts and watches the processes of a trainer's other ranks. Rank 0, the trainer's main process, uses it.

The others share its process group and its output, and end with it. If one of them ends, all end, for its reason.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from nexrl import parent_death
from nexrl.errors import NexrlError, explain_exit
from nexrl.weights.transport import cloned, listening_store
from nexrl_trainer.ranks import Ranks, join_ranks

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RANK, SIZE, RENDEZVOUS_PORT = "NEXRL_RANK", "NEXRL_RANKS", "NEXRL_RENDEZVOUS_PORT"
"""Variables of the other ranks' processes."""
NOTICE_SECONDS = 5.0
"""Time in which rank 0's main thread notices that another rank's process has ended, and ends them all."""


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
        ranks = {asyncio.create_task(process.wait()): rank for rank, process in enumerate(self.processes, 1)}
        try:
            ended, _ = await asyncio.wait(ranks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in ranks:
                wait.cancel()
        first = min(ended, key=ranks.__getitem__)
        rank, code = ranks[first], first.result()
        await self.end()  # or the others would complain of each other after the true reason
        log.critical("rank %d of the trainer ended with code %d%s", rank, code, self._reason(rank, code))
        _end_process(code or 1)  # a rank never ends by itself without an error

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


def end_for(error: BaseException) -> NoReturn:
    """Log the error and end this process at once, with the error's exit code."""
    if isinstance(error, NexrlError):
        log.critical("%s", error)
        _end_process(error.exit_code)
    log.critical("crashed", exc_info=error)
    _end_process(1)


@contextmanager
def wait_for_gang_end() -> Iterator[None]:
    """After an error of a collective, wait until rank 0 ends this process. Raise the error if it does not.

    The reason of such an error is mostly that another rank has ended. Rank 0 then ends all with that rank's code.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(NOTICE_SECONDS)
        raise


async def _start(rank: int, size: int, instance: str, port: int) -> asyncio.subprocess.Process:
    own = {RANK: str(rank), SIZE: str(size), RENDEZVOUS_PORT: str(port), "NEXRL_INSTANCE": f"{instance}-rank-{rank}"}
    # The child inherits that SIGTERM is blocked: one that comes while it imports waits until it can be passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
            *(sys.executable, "-P", "-m", "nexrl_trainer.follower"),  # -P: files of the working folder are no modules
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **own},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_process(code: int) -> NoReturn:
    """End this process at once with an exit code, or by signal -`code`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)  # threads of torch and Gloo must not delay the end
