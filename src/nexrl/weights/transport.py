"""Broadcasts packed buckets to the members of one epoch, by Gloo or NCCL.

Each blocking function raises UnavailableError if a peer is gone, or silent for the timeout of the rendezvous.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.weights.gloo import GlooChannel
from nexrl.weights.gpu import Gpu
from nexrl.weights.nccl import NcclChannel
from nexrl.weights.rendezvous import TRAINER_RANK, Rendezvous, Transport

STORE_SECONDS = 30.0
"""Timeout of one operation on the trainer's own TCP store."""
REACH_SECONDS = 5.0
"""Timeout to connect to the trainer's store. It listens before replicas are told its address."""
_BACKLOG = 128
_GO, _ABORTED = "go", "aborted"


class Channel(Protocol):
    """The connection between the members of one epoch. Its methods raise RuntimeError if a member is gone or silent.

    The constructor may write to the store; it comes before any member connects. `connect` and `broadcast` block.
    """

    def connect(self) -> None:
        """Connect to all members, each of which has its channel."""

    def broadcast(self, buffer: Tensor) -> None:
        """Send `buffer` (uint8, shape [nbytes]) from the trainer, or receive into it."""

    def abort(self) -> None:
        """End a running call, and leave. May be called from another thread, and again. Does not block."""


class Sender:
    """The trainer's end (rank 0). Its TCP store listens until `close` and serves all epochs."""

    def __init__(self, host: str, gpu: Gpu | None = None) -> None:
        """`host` is the address at which replicas reach this machine. `gpu`: what it can use NCCL with.

        Raises FailedPreconditionError if `host` is not an address of this machine.
        """
        self.host = host
        self.gpu = gpu
        self._store = listening_store(host)
        self._group: Group | None = None

    @property
    def port(self) -> int:
        """Port of the TCP store."""
        return int(self._store.port)

    @property
    def open_epoch(self) -> int:
        """Epoch of the open group, which can be used again; 0 if none is open."""
        return self._group.epoch if self._group is not None and self._group.is_open else 0

    @property
    def device(self) -> torch.device:
        """Where the next version is best packed: in the memory that the open group sends from."""
        is_nccl = self._group is not None and self._group.transport is Transport.NCCL
        return self.gpu.device if self.gpu is not None and is_nccl else torch.device("cpu")

    def group(self, rendezvous: Rendezvous) -> "Group":
        """Return the group of the epoch: the open one, or a new one that joins at its first use."""
        if self._group is None or self.open_epoch != rendezvous.epoch:
            self.close_group()
            self._group = Group(rendezvous, lambda: (cloned(self._store), self.host), self.gpu)
        return self._group

    def close_group(self) -> None:
        """Leave the open group, if there is one. Its other members notice."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def close(self) -> None:
        """Leave the group and stop listening."""
        self.close_group()
        del self._store


class Receiver:
    """A replica's end."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        """`gpu`: what it can use NCCL with."""
        self._gpu = gpu
        self._group: Group | None = None

    def group(self, rendezvous: Rendezvous) -> "Group":
        """Return the group of the epoch: the open one, or a new one that joins at its first use."""
        if self._group is None or not self._group.is_open or self._group.epoch != rendezvous.epoch:
            self.close_group()
            self._group = Group(rendezvous, lambda: _reached_store(rendezvous), self._gpu)
        return self._group

    def close_group(self) -> None:
        """Leave the open group, if there is one. Its other members notice."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class Group:
    """The members of one epoch. `send` and `receive` block; `abort` may be called from another thread.

    A group that failed or was aborted stays closed: the next sync needs a new epoch.
    """

    def __init__(
        self, rendezvous: Rendezvous, open_store: Callable[[], tuple[TCPStore, str]], gpu: Gpu | None = None
    ) -> None:
        """`open_store` returns a connection to the TCP store, and the address of this process for its peers.

        Raises InvalidArgumentError for NCCL without a GPU.
        """
        if rendezvous.transport is Transport.NCCL and gpu is None:
            raise InvalidArgumentError(
                "rendezvous: transport: nccl, but this process has no GPU for it; set weightSync.transport: auto"
            )
        self._rendezvous = rendezvous
        self._open_store = open_store
        self._gpu = gpu
        self._store: TCPStore | None = None
        self._channel: Channel | None = None
        self._is_connected = False
        self._is_closed = False

    @property
    def epoch(self) -> int:
        """The membership epoch."""
        return self._rendezvous.epoch

    @property
    def transport(self) -> Transport:
        """What carries the broadcasts."""
        return self._rendezvous.transport

    @property
    def is_open(self) -> bool:
        """False once it has failed or was aborted."""
        return not self._is_closed

    def send(self, buffers: Sequence[Tensor]) -> None:
        """Broadcast packed buckets, each uint8 of shape [nbytes], on the GPU or the host, to all other members."""
        with self._closed_on_failure():
            self._join()
            for buffer in buffers:
                self._broadcast(buffer)

    def receive(self, buffers: Sequence[Tensor]) -> None:
        """Receive the trainer's buckets into `buffers`, each uint8 of shape [nbytes]. With Gloo, on the host."""
        with self._closed_on_failure():
            self._join()
            for buffer in buffers:
                self._broadcast(buffer)

    def abort(self) -> None:
        """Close the group, which ends a blocking call in it. The trainer also ends the wait of members that join."""
        self._is_closed = True
        if self._channel is not None:
            self._channel.abort()
        if self._rendezvous.rank == TRAINER_RANK and self._store is not None and not self._is_connected:
            # A clone, because the call that waits for the verdict blocks the connection itself.
            self._keys(cloned(self._store)).compare_set("verdict", "", _ABORTED)

    def _join(self) -> None:
        """Wait for all members, then connect to each.

        Members wait for the verdict in the store before the channel connects, because Gloo's own wait cannot be
        aborted.
        """
        if self._is_connected:
            return
        self._store, host = self._open_store()
        keys, timeout = self._keys(self._store), timedelta(seconds=self._rendezvous.timeout_seconds)
        channel = self._channel = _channel(keys, self._rendezvous, host, self._gpu)
        if keys.add("joined", 1) == self._rendezvous.world_size:
            keys.compare_set("verdict", "", _GO)
        self._refuse_if_closed()
        keys.wait(["verdict"], timeout)
        if keys.get("verdict").decode() != _GO:
            raise UnavailableError(f"weights: the trainer aborted epoch {self.epoch}")
        channel.connect()
        self._is_connected = True

    def _broadcast(self, buffer: Tensor) -> None:
        self._refuse_if_closed()
        assert self._channel is not None
        self._channel.broadcast(buffer)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise UnavailableError(f"weights: the transfer of epoch {self.epoch} was aborted")

    def _keys(self, store: TCPStore) -> PrefixStore:
        return PrefixStore(f"nexrl/weights/{self.epoch}", store)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._is_closed = True
            if self._channel is not None:
                self._channel.abort()
            if not isinstance(error, RuntimeError):
                raise
            # torch.distributed and NCCL raise it if a peer or the store is gone or silent.
            reason = str(error).splitlines()[0]
            raise UnavailableError(f"weights: {self.transport} transfer of epoch {self.epoch}: {reason}") from error


def _channel(keys: PrefixStore, rendezvous: Rendezvous, host: str, gpu: Gpu | None) -> Channel:
    if rendezvous.transport is Transport.NCCL:
        assert gpu is not None
        return NcclChannel(keys, rendezvous, gpu.device)
    return GlooChannel(keys, rendezvous, host)


def cloned(store: TCPStore) -> TCPStore:
    """Return another connection to the same store: a call that waits blocks its connection for other threads."""
    clone: TCPStore = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    return clone


def listening_store(host: str) -> TCPStore:
    """Return a TCP store that listens at a free port of `host`. Raises FailedPreconditionError if it cannot."""
    try:
        listener = socket.create_server((host, 0), backlog=_BACKLOG)
    except OSError as error:
        raise FailedPreconditionError(f"process group: cannot listen at {host}: {error.strerror or error}") from None
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=listener.detach(),  # without this, the store would listen on every interface
    )


def _reached_store(rendezvous: Rendezvous) -> tuple[TCPStore, str]:
    """Return a connection to the trainer's store, and the local address of that connection."""
    try:
        # Try a plain connection first: the store's client would retry a refused port until its timeout.
        with socket.create_connection((rendezvous.host, rendezvous.port), rendezvous.timeout_seconds) as probe:
            local_host = probe.getsockname()[0]
    except OSError as error:
        raise UnavailableError(f"weights: no trainer at {rendezvous.host}:{rendezvous.port}: {error}") from None
    # If the trainer dies now, the client retries until this timeout, and nothing can abort it.
    reach = timedelta(seconds=min(REACH_SECONDS, rendezvous.timeout_seconds))
    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=reach)
    store.set_timeout(timedelta(seconds=rendezvous.timeout_seconds))
    return store, local_host
