"""What is around NCCL: deadlines, aborts, and buffers on two devices. A stand-in takes the place of NCCL itself."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.weights import nccl_communicator, packing
from nexrl.weights.gpu import Gpu, gpu_for_transfer
from nexrl.weights.packing import Snapshot, allocate, digest, snapshot
from nexrl.weights.rendezvous import Rendezvous, Transport
from nexrl.weights.transport import Receiver, Sender
from tests.support import standin_nccl
from tests.support.patience import LIMIT_SECONDS, eventually, eventually_blocking
from tests.support.standin_nccl import StandInCommunicator, standin_gpu

SILENCE_SECONDS = 2 * LIMIT_SECONDS
"""How long a group waits for a silent member: longer than a test waits, so what ends before was not this wait."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first communicator's folder, in which the stand-in writes what happens."""
    standin_nccl.install(tmp_path, monkeypatch)
    return tmp_path / "communicator-0"


@pytest.fixture
def sender() -> Sender:
    return Sender("127.0.0.1", standin_gpu("GPU-0"))


def packed(seed: int = 0) -> Snapshot:
    return snapshot([("a", torch.arange(1000) + seed), ("b", torch.ones(7))], policy_version=seed, bucket_bytes=4096)


def rendezvous(sender: Sender, rank: int, timeout_seconds: float = SILENCE_SECONDS) -> Rendezvous:
    return Rendezvous(1, sender.host, sender.port, rank, 2, timeout_seconds, Transport.NCCL)


def in_thread(function: Callable[[], None]) -> "Future[None]":
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function)
    finally:
        pool.shutdown(wait=False)


def test_buckets_arrive_in_every_sync_of_an_epoch_through_one_communicator(folder: Path, sender: Sender) -> None:
    receiver = Receiver(standin_gpu("GPU-1"))
    for seed in range(2):
        weights = packed(seed)
        buffers = allocate(weights.manifest)
        sent = in_thread(partial(sender.group(rendezvous(sender, 0)).send, weights.buffers))
        receiver.group(rendezvous(sender, 1)).receive(buffers)
        sent.result(LIMIT_SECONDS)
        assert digest(weights.manifest, buffers) == weights.manifest.digest
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    receiver.close_group()
    sender.close()


async def test_a_member_that_never_receives_is_given_up_at_the_deadline(folder: Path, sender: Sender) -> None:
    group = sender.group(rendezvous(sender, 0, timeout_seconds=0.5))
    silent = Receiver(standin_gpu("GPU-1")).group(rendezvous(sender, 1))
    joining = in_thread(silent._join)
    with pytest.raises(UnavailableError, match=r"nccl transfer of epoch 1: NCCL: a member was silent for 0\.5 s"):
        group.send(packed().buffers)
    joining.result(LIMIT_SECONDS)
    assert sender.open_epoch == 0
    await eventually((folder / "aborted.0").exists)
    silent.abort()
    await eventually((folder / "aborted.1").exists)
    sender.close()


async def test_calling_off_ends_a_broadcast_that_hangs(folder: Path, sender: Sender) -> None:
    group = sender.group(rendezvous(sender, 0))
    silent = Receiver(standin_gpu("GPU-1")).group(rendezvous(sender, 1))
    joining = in_thread(silent._join)
    sent = in_thread(partial(group.send, packed().buffers))
    await eventually((folder / "content.1").exists)
    in_thread(group.abort).result(LIMIT_SECONDS)  # nobody waits for NCCL
    with pytest.raises(UnavailableError, match="aborted"):
        sent.result(LIMIT_SECONDS)
    await eventually((folder / "aborted.0").exists)
    joining.result(LIMIT_SECONDS)
    silent.abort()
    sender.close()


async def test_a_member_that_dies_while_all_connect_is_given_up_at_the_deadline(folder: Path, sender: Sender) -> None:
    group = sender.group(rendezvous(sender, 0, timeout_seconds=0.5))
    keys = group._keys(sender._store)
    sent = in_thread(partial(group.send, packed().buffers))
    keys.add("joined", 1)  # and no more
    await eventually(lambda: keys.add("joined", 0) == 2)
    keys.compare_set("verdict", "", "go")
    with pytest.raises(UnavailableError, match="a member was silent"):
        sent.result(LIMIT_SECONDS)
    await eventually((folder / "aborted.0").exists)
    sender.close()


async def test_an_abort_at_the_end_of_a_broadcast_frees_the_communicator(
    folder: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, weights = Receiver(standin_gpu("GPU-1")), packed()
    group, is_idle = sender.group(rendezvous(sender, 0)), StandInCommunicator.is_idle

    def aborted_when_idle(communicator: StandInCommunicator) -> bool:
        idle = is_idle(communicator)
        if idle and communicator._rank == 0 and communicator._broadcasts == len(weights.buffers):
            group.abort()
        return idle

    monkeypatch.setattr(StandInCommunicator, "is_idle", aborted_when_idle)
    sent = in_thread(partial(group.send, weights.buffers))
    receiver.group(rendezvous(sender, 1)).receive(allocate(weights.manifest))
    sent.result(LIMIT_SECONDS)  # all is sent
    await eventually((folder / "aborted.0").exists)
    receiver.close_group()
    sender.close()


def test_a_group_that_ends_while_nothing_runs_frees_its_communicator(folder: Path, sender: Sender) -> None:
    receiver, weights = Receiver(standin_gpu("GPU-1")), packed()
    sent = in_thread(partial(sender.group(rendezvous(sender, 0)).send, weights.buffers))
    receiver.group(rendezvous(sender, 1)).receive(allocate(weights.manifest))
    sent.result(LIMIT_SECONDS)
    receiver.close_group()
    sender.close()
    eventually_blocking(lambda: all((folder / f"aborted.{rank}").exists() for rank in (0, 1)))


def test_the_next_version_is_packed_where_the_open_group_sends_from(sender: Sender) -> None:
    other = Sender("127.0.0.1", Gpu(torch.device("cuda", 3), "GPU-3"))
    assert other.device == torch.device("cpu")
    other.group(rendezvous(other, 0))
    assert other.device == torch.device("cuda", 3)
    other.close_group()
    assert other.device == torch.device("cpu")
    other.close()
    sender.close()


def test_nccl_without_a_gpu_is_refused_before_anything_is_sent(sender: Sender) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has no GPU for it; set weightSync\.transport: auto"):
        Receiver().group(rendezvous(sender, 1))
    sender.close()


def test_a_bucket_that_does_not_fit_on_the_device_is_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    zeros, gpu = torch.zeros, torch.device("cuda", 0)

    def full(*arguments: int, **options: Any) -> torch.Tensor:
        if options.get("device") == gpu:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", full)
    assert {buffer.device.type for buffer in allocate(packed().manifest, gpu)} == {"cpu"}
    assert "the memory of cuda:0 is full" in caplog.text


def test_what_is_on_a_device_is_unpacked_there() -> None:
    manifest, device = packed().manifest, torch.device("meta")  # nothing can be copied from it
    assert {tensor.device for tensor in packing.unpack(manifest, allocate(manifest, device)).values()} == {device}


def test_memory_of_another_device_is_not_packed_into_again() -> None:
    before = packed()
    assert packing.reusable(before, before.manifest, torch.device("cpu")) == before.buffers
    assert packing.reusable(before, before.manifest, torch.device("cuda", 0)) == ()


def test_the_setting_decides_and_nccl_needs_a_gpu() -> None:
    cpu = torch.device("cpu")
    assert gpu_for_transfer("gloo", torch.device("cuda", 0)) is None
    assert gpu_for_transfer("auto", cpu) is None
    with pytest.raises(FailedPreconditionError, match=r"weightSync\.transport: nccl, but this process computes on cpu"):
        gpu_for_transfer("nccl", cpu)


def test_a_gpu_without_the_library_of_nccl_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_communicator, "_LIBRARY", "libnccl-that-is-not-there.so")
    nccl_communicator.library.cache_clear()
    assert gpu_for_transfer("auto", torch.device("cuda", 0)) is None
    assert "weights go through host memory: NCCL: libnccl-that-is-not-there.so" in caplog.text
    with pytest.raises(FailedPreconditionError, match=r"install PyTorch for CUDA, or set weightSync\.transport: gloo"):
        gpu_for_transfer("nccl", torch.device("cuda", 0))
