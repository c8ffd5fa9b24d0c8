"""The processes of ranks other than 0, as the main process of their replica starts, watches and kills them.

They share the main process's process group and output, and end with it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from nexrl import parent_death

RANK, SIZE, RENDEZVOUS = "NEXRL_RANK", "NEXRL_RANKS", "NEXRL_RENDEZVOUS"
"""Variables of these processes."""


class RankEnd(NamedTuple):
    """How a rank ended."""

    rank: int
    """With `lost`, the first rank of the replica that is lost."""
    exit_code: int
    """Negative for the signal that ended it."""
    lost: str = ""
    """Why nothing is known of the rank any more; empty if its end was seen."""


class Member(Protocol):
    """A rank, or a replica with its ranks, as a main process sees it."""

    @property
    def ended(self) -> "asyncio.Task[RankEnd]":
        """Done when it has ended."""

    async def end(self, exit_code: int, reason: str) -> None:
        """End it, if it has not ended, and say why."""


@dataclass(frozen=True)
class RankProcess:
    """The started process of one rank."""

    process: asyncio.subprocess.Process
    ended: "asyncio.Task[RankEnd]"

    @classmethod
    def watched(cls, rank: int, process: asyncio.subprocess.Process) -> "RankProcess":
        """Watch the process of a rank."""

        async def ended() -> RankEnd:
            return RankEnd(rank, await process.wait())

        return cls(process, asyncio.create_task(ended()))

    async def end(self, exit_code: int, reason: str) -> None:
        """Kill it: it holds nothing that is not in a checkpoint or in the ledger."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def first_end(members: Sequence[Member]) -> RankEnd:
    """Wait until a member ends, and return how the first one ended. Raises the error of a replica that refuses."""
    ended, _ = await asyncio.wait([member.ended for member in members], return_when=asyncio.FIRST_COMPLETED)
    return min((each.result() for each in ended), key=lambda end: (bool(end.lost), end.rank))


async def end_all(members: Sequence[Member], exit_code: int, reason: str) -> None:
    """End all members, and say why."""
    await asyncio.gather(*(member.end(exit_code, reason) for member in members))


async def start_ranks(ranks: range, size: int, instance: str, rendezvous: str) -> list[RankProcess]:
    """Start the processes of these of `size` ranks. They meet the others in the store at `rendezvous`, host:port."""
    return [RankProcess.watched(rank, await _start(rank, size, instance, rendezvous)) for rank in ranks]


def end_process(code: int) -> NoReturn:
    """End this process at once with an exit code, or by signal -`code`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)  # threads of torch and Gloo must not delay the end


async def _start(rank: int, size: int, instance: str, rendezvous: str) -> asyncio.subprocess.Process:
    own = {RANK: str(rank), SIZE: str(size), RENDEZVOUS: rendezvous, "NEXRL_INSTANCE": f"{instance}-rank-{rank}"}
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
