"""A broadcast between the memories of GPUs, by NCCL. No call waits for a peer longer than the rendezvous allows.

NCCL itself has no deadline: a kernel waits for a dead or silent peer for ever. So the communicator never blocks, this
module polls it, and `ncclCommAbort` ends what is too late. The process goes on, and so does its CUDA context.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from nexrl.weights.nccl_communicator import Communicator, new_unique_id
from nexrl.weights.rendezvous import TRAINER_RANK, Rendezvous

POLL_SECONDS = 0.0002
_UNIQUE_ID = "nccl_unique_id"


class NcclChannel:
    """See `nexrl.weights.transport.Channel`. Each process of the group must have a device of its own."""

    def __init__(self, keys: PrefixStore, rendezvous: Rendezvous, device: torch.device) -> None:
        """`keys` are those of the epoch. The trainer writes there what the others need to connect."""
        self._keys = keys
        self._rendezvous = rendezvous
        self._device = device
        self._communicator: Communicator | None = None
        self._in_use = threading.Lock()
        self._aborted = threading.Event()
        if rendezvous.rank == TRAINER_RANK:
            keys.set(_UNIQUE_ID, new_unique_id().hex())

    def connect(self) -> None:
        """Connect to all members."""
        unique_id = bytes.fromhex(self._keys.get(_UNIQUE_ID).decode())
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        with self._using():
            self._communicator = Communicator(unique_id, rank, world_size, self._device)
            self._wait(self._communicator)

    def broadcast(self, buffer: Tensor) -> None:
        """Send `buffer`, or receive into it. One that is not on the device is copied over a buffer that is."""
        with self._using():
            communicator = self._communicator
            if communicator is None:
                raise RuntimeError("it was aborted")
            on_device = buffer.to(self._device)
            communicator.broadcast(on_device, TRAINER_RANK)
            self._wait(communicator)
            if on_device is not buffer and self._rendezvous.rank != TRAINER_RANK:
                buffer.copy_(on_device)

    def abort(self) -> None:
        """End a running call, and leave the group. Does not block."""
        self._aborted.set()
        if self._in_use.acquire(blocking=False):  # otherwise the running call comes here when it ends
            communicator, self._communicator = self._communicator, None
            self._in_use.release()
            if communicator is not None:
                # In a thread, because NCCL joins its own threads first.
                threading.Thread(target=communicator.abort, name="nccl-abort", daemon=True).start()

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            with self._in_use:
                yield
        finally:
            if self._aborted.is_set():
                self.abort()

    def _wait(self, communicator: Communicator) -> None:
        """Wait until the communicator has nothing left to do. Raises RuntimeError if it failed or was aborted."""
        timeout_seconds = self._rendezvous.timeout_seconds
        deadline = time.monotonic() + timeout_seconds
        while not communicator.is_idle():
            if self._aborted.wait(POLL_SECONDS):
                raise RuntimeError("it was aborted")
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL: a member was silent for {timeout_seconds:g} s")
