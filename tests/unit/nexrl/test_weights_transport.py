"""The broadcast, between threads of one process: each end has a process group of its own."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.weights.packing import Snapshot, allocate, digest, snapshot
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.transport import Receiver, Sender
from tests.support.patience import LIMIT_SECONDS, eventually_blocking

SILENCE_SECONDS = 2 * LIMIT_SECONDS
"""How long a group waits for a silent member: longer than a test waits, so what ends before was not this wait."""

T = TypeVar("T")


def packed(seed: int = 0, *, size: int = 1000) -> Snapshot:
    tensors = [("a", torch.arange(size) + seed), ("b", torch.full((3, 5), seed, dtype=torch.bfloat16))]
    return snapshot(tensors, policy_version=seed, bucket_bytes=4096)


def rendezvous(sender: Sender, rank: int, *, epoch: int = 1, world_size: int = 2) -> Rendezvous:
    return Rendezvous(epoch, sender.host, sender.port, rank, world_size, SILENCE_SECONDS)


def in_thread(function: Callable[[], T]) -> "Future[T]":
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function)
    finally:
        pool.shutdown(wait=False)


def sending(sender: Sender, weights: Snapshot, **changes: int) -> "Future[None]":
    return in_thread(partial(sender.group(rendezvous(sender, 0, **changes)).send, weights.buffers))


def receiving(
    receiver: Receiver, sender: Sender, rank: int, weights: Snapshot, **changes: int
) -> "Future[list[Tensor]]":
    group, buffers = receiver.group(rendezvous(sender, rank, **changes)), allocate(weights.manifest)

    def receive() -> list[Tensor]:
        group.receive(buffers)
        return buffers

    return in_thread(receive)


def test_every_receiver_gets_the_bytes_that_were_sent_in_every_sync_of_an_epoch() -> None:
    sender, receivers = Sender("127.0.0.1"), [Receiver(), Receiver()]
    for seed in range(3):
        weights = packed(seed)
        sent = sending(sender, weights, world_size=3)
        arriving = [receiving(r, sender, rank, weights, world_size=3) for rank, r in enumerate(receivers, start=1)]
        sent.result(LIMIT_SECONDS)
        for arrived in arriving:
            assert digest(weights.manifest, arrived.result(LIMIT_SECONDS)) == weights.manifest.digest
        assert sender.open_epoch == 1
    for receiver in receivers:
        receiver.close_group()
    sender.close()


def test_a_new_epoch_has_a_new_group() -> None:
    sender, receiver, weights = Sender("127.0.0.1"), Receiver(), packed()
    for epoch in (1, 2):
        sent = sending(sender, weights, epoch=epoch)
        receiving(receiver, sender, 1, weights, epoch=epoch).result(LIMIT_SECONDS)
        sent.result(LIMIT_SECONDS)
        assert sender.open_epoch == epoch
    receiver.close_group()
    sender.close()


def test_a_member_that_left_ends_the_broadcast_at_once() -> None:
    sender, receiver, weights = Sender("127.0.0.1"), Receiver(), packed()
    sent = sending(sender, weights)
    receiving(receiver, sender, 1, weights).result(LIMIT_SECONDS)
    sent.result(LIMIT_SECONDS)
    receiver.close_group()
    with pytest.raises(UnavailableError, match="epoch 1"):
        sending(sender, weights).result(LIMIT_SECONDS)
    assert sender.open_epoch == 0
    sender.close()


def test_calling_off_ends_the_wait_of_all_who_wait_to_join() -> None:
    sender, receiver, weights = Sender("127.0.0.1"), Receiver(), packed()
    group = sender.group(rendezvous(sender, 0, world_size=3))
    waiting: list[Future[Any]] = [
        sending(sender, weights, world_size=3),
        receiving(receiver, sender, 1, weights, world_size=3),
    ]
    joined = group._keys(sender._store)
    eventually_blocking(lambda: joined.add("joined", 0) == 2, "both wait to join")
    group.abort()
    for future in waiting:
        with pytest.raises(UnavailableError, match="aborted"):
            future.result(LIMIT_SECONDS)
    sender.close()


def test_calling_off_ends_a_broadcast_to_a_silent_member() -> None:
    sender, receiver, weights = Sender("127.0.0.1"), Receiver(), packed()
    group, silent = sender.group(rendezvous(sender, 0)), receiver.group(rendezvous(sender, 1))
    joining = in_thread(silent._join)
    entered = threading.Event()

    def send() -> None:
        group._join()
        entered.set()
        group.send(weights.buffers)

    sent = in_thread(send)
    joining.result(LIMIT_SECONDS)
    assert entered.wait(LIMIT_SECONDS)
    group.abort()
    with pytest.raises(UnavailableError, match="aborted"):
        sent.result(LIMIT_SECONDS)
    silent.abort()
    sender.close()


def test_a_trainer_that_is_gone_is_noticed_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gone = Rendezvous(1, "127.0.0.1", port, 1, 2, SILENCE_SECONDS)
    with pytest.raises(UnavailableError, match="no trainer"):
        Receiver().group(gone).receive(allocate(packed().manifest))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match=r"cannot listen at 192\.0\.2\.1"):
        Sender("192.0.2.1")
