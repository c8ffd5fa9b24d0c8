"""Weights by the real NCCL, between processes that share one GPU or have one each.

Several processes on one GPU need NCCL 2.30, which PyTorch may not bring: `pip install nvidia-nccl-cu13==2.32.3`.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nexrl.weights import nccl_communicator
from tests.support.gpu import SHARED_GPU_NCCL
from tests.support.nccl_process import Answer, Transfer, main, version
from tests.support.spawned_processes import SpawnedProcesses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
]

DEADLINE_SECONDS = 5.0
CPU = torch.device("cpu")


@pytest.fixture(params=["one GPU", "a GPU each"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpawnedProcesses]:
    """The trainer and one or two replicas."""
    devices = 1 if request.param == "one GPU" else torch.cuda.device_count()
    if request.param == "one GPU":
        if nccl_communicator.version() < SHARED_GPU_NCCL:
            pytest.skip(f"needs NCCL 2.30 or later for several processes on a GPU, not {nccl_communicator.version()}")
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    elif devices < 2:
        pytest.skip("needs two GPUs")
    ends = SpawnedProcesses(2 if devices == 2 else 3, main, devices)
    yield ends
    ends.end()


@pytest.fixture
def port(ends: SpawnedProcesses) -> int:
    """The port of the trainer's store."""
    return int(ends.ask("port")[0])


def test_every_gpu_gets_the_bytes_that_were_sent_in_every_sync_of_an_epoch(ends: SpawnedProcesses, port: int) -> None:
    for seed in range(3):
        answers: list[Answer] = ends.ask(Transfer(1, port, len(ends), seed))
        assert [answer.error for answer in answers] == [""] * len(ends)
        assert {answer.digest for answer in answers} == {version(seed, CPU).manifest.digest}


def test_buckets_in_host_memory_are_copied_over_the_gpu(ends: SpawnedProcesses, port: int) -> None:
    answers: list[Answer] = ends.ask(Transfer(1, port, len(ends), 4, is_on_host=True))
    assert {answer.digest for answer in answers} == {version(4, CPU).manifest.digest}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
@pytest.mark.parametrize("victim", ["trainer", "replica"])
def test_a_member_that_dies_or_hangs_in_a_broadcast_ends_no_other_process(
    ends: SpawnedProcesses, port: int, victim: str, how: int
) -> None:
    ends.ask(Transfer(1, port, len(ends), 0, DEADLINE_SECONDS))
    rank = 0 if victim == "trainer" else len(ends) - 1
    request = Transfer(1, port, len(ends), 1, DEADLINE_SECONDS, rank, how)
    answers: list[Answer] = ends.ask(request, silent=rank)
    ends.kill(rank)
    sent = version(1, CPU).manifest.digest
    for answer in answers:
        # With NCCL 2.32 a member beside a dead replica may have got everything already.
        assert "nccl transfer of epoch 1" in answer.error or (victim == "replica" and answer.digest == sent)
        assert answer.seconds < 3 * DEADLINE_SECONDS
        assert answer.computes


def test_those_that_are_left_form_a_new_epoch(ends: SpawnedProcesses, port: int) -> None:
    rank = len(ends) - 1
    if rank < 2:
        pytest.skip("needs a trainer and two replicas: three GPUs, or one that they share")
    ends.ask(Transfer(1, port, len(ends), 1, DEADLINE_SECONDS, rank), silent=rank)
    answers: list[Answer] = ends.ask(Transfer(2, port, rank, 2), number=rank)
    assert {answer.digest for answer in answers} == {version(2, CPU).manifest.digest}


def test_the_library_is_the_one_that_pytorch_has_loaded() -> None:
    # torch.cuda.nccl.version() is what PyTorch was compiled with; a newer library may have been installed since.
    major, minor, patch = torch.cuda.nccl.version()[:3]
    assert nccl_communicator.version() >= major * 10_000 + minor * 100 + patch
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "libnccl.so" in line}) == 1
    assert len(nccl_communicator.new_unique_id()) == 128
