"""A process with a GPU that is one end of a broadcast by NCCL, the real one. It does what the test asks.

It says what its end of each transfer came to, and whether its GPU can still compute afterwards.
"""

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from nexrl.errors import UnavailableError
from nexrl.weights.gpu import Gpu, gpu_for_transfer
from nexrl.weights.packing import Snapshot, allocate, digest, snapshot
from nexrl.weights.rendezvous import TRAINER_RANK, Rendezvous, Transport
from nexrl.weights.transport import Group, Receiver, Sender

HOST = "127.0.0.1"
TENSORS, ELEMENTS = 32, 2**20
BUCKET_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Transfer:
    """A request: one transfer of the version `seed` (128 MiB) in an epoch. `port` is that of the trainer's store."""

    epoch: int
    port: int
    world_size: int
    seed: int
    timeout_seconds: float = 60.0
    victim: int | None = None
    """The rank that stops after its first bucket."""
    how: int = signal.SIGKILL
    """The signal that stops it."""
    is_on_host: bool = False
    """Whether the buckets are in host memory, as if that of the GPU were full."""


@dataclass(frozen=True)
class Answer:
    """`digest` is that of what arrived, `error` says why nothing did. `computes`: whether the GPU still works."""

    digest: str
    error: str
    seconds: float
    computes: bool


def main(rank: int, devices: int, connection: Connection) -> None:
    """Entry point: answer with the port of the store, then each Transfer, until the connection is closed."""
    device = torch.device("cuda", rank % devices)
    gpu = gpu_for_transfer("nccl", device)
    assert gpu is not None
    end: Sender | Receiver = Sender(HOST, gpu) if rank == TRAINER_RANK else Receiver(gpu)
    try:
        connection.recv()
        connection.send(end.port if isinstance(end, Sender) else 0)
        while True:
            request: Transfer = connection.recv()
            connection.send(_answer(end, gpu, rank, request))
    except EOFError:
        end.close_group()


def _answer(end: Sender | Receiver, gpu: Gpu, rank: int, request: Transfer) -> Answer:
    rendezvous = Rendezvous(
        *(request.epoch, HOST, request.port, rank, request.world_size, request.timeout_seconds), Transport.NCCL
    )
    device = torch.device("cpu") if request.is_on_host else gpu.device
    weights = version(request.seed, device)
    buffers = weights.buffers if rank == TRAINER_RANK else tuple(allocate(weights.manifest, device))
    group = end.group(rendezvous)
    if rank == request.victim:
        _stop_after_the_first_bucket(group, request.how)
    began, error = time.monotonic(), ""
    try:
        if rank == TRAINER_RANK:
            group.send(buffers)
        else:
            group.receive(buffers)
    except UnavailableError as failure:
        error = str(failure)
    seconds = time.monotonic() - began
    arrived = "" if error else digest(weights.manifest, buffers)
    return Answer(arrived, error, seconds, _computes(gpu.device))


def version(seed: int, device: torch.device) -> Snapshot:
    """Return the version `seed`, packed on the device. It is the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [(f"t{number}", torch.randn(ELEMENTS, generator=generator)) for number in range(TENSORS)]
    return snapshot(tensors, policy_version=seed, bucket_bytes=BUCKET_BYTES, device=device)


def _stop_after_the_first_bucket(group: Group, how: int) -> None:
    broadcast = group._broadcast

    def last_broadcast(buffer: torch.Tensor) -> None:
        broadcast(buffer)
        os.kill(os.getpid(), how)

    group._broadcast = last_broadcast  # type: ignore[method-assign]


def _computes(device: torch.device) -> bool:
    ones = torch.ones(64, 64, device=device)
    return bool(((ones @ ones) == 64).all())
