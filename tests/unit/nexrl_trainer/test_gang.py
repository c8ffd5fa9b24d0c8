"""What ends a trainer of several ranks, as its main process sees it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nexrl.rpc.server import ServiceProcess
from nexrl.weights.transport import listening_store
from nexrl_trainer import gang, server
from nexrl_trainer.gang import Gang
from nexrl_trainer.rank_processes import RankProcess
from nexrl_trainer.ranks import LOOPBACK
from tests.support.services import settings, small_experiment

RANKS_CODE = 7


def gang_of(*processes: Any) -> Gang:
    """The gang of rank 0 and these processes."""
    members = [RankProcess.watched(rank, process) for rank, process in enumerate(processes, 1)]
    return Gang(listening_store(LOOPBACK), LOOPBACK, 1 + len(processes), members)


async def test_a_rank_that_ends_while_the_ranks_join_is_the_reason_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with_its_input = ("sh", "-c", f"read line; exit {RANKS_CODE}")
    rank = await asyncio.create_subprocess_exec(*ends_with_its_input, stdin=asyncio.subprocess.PIPE)
    assert rank.stdin is not None
    end_rank, loop = rank.stdin.close, asyncio.get_running_loop()
    codes: list[int] = []

    async def started(*_: Any) -> Gang:
        return gang_of(rank)

    def join(*_: Any) -> None:
        loop.call_soon_threadsafe(end_rank)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(server, "start_gang", started)
    monkeypatch.setattr(gang, "join_ranks", join)
    monkeypatch.setattr(gang, "NOTICE_SECONDS", 2.0)
    monkeypatch.setattr(gang, "end_process", codes.append)
    experiment = small_experiment(trainer={"steps": 4, "processesPerReplica": 2, "device": "cpu"})
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        await server._lead(ServiceProcess("trainer", settings(tmp_path), experiment))
    assert codes == [RANKS_CODE]


class EndedProcess:
    """A process that has ended. If that is `unnoticed`, the first wait for it does not return."""

    def __init__(self, returncode: int, *, unnoticed: bool) -> None:
        self.returncode = returncode
        self._unnoticed = unnoticed

    async def wait(self) -> int:
        if self._unnoticed:
            self._unnoticed = False
            await asyncio.Event().wait()
        return self.returncode


async def test_the_rank_that_ended_first_is_the_reason_of_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(gang, "end_process", codes.append)
    await gang_of(EndedProcess(1, unnoticed=True), EndedProcess(RANKS_CODE, unnoticed=False)).watch()
    assert codes == [RANKS_CODE]
    assert f"rank 2 of the trainer ended with code {RANKS_CODE}" in caplog.text
