"""Broadcasts packed buckets over a torch.distributed process group of its own, never the default group.

Each blocking function raises UnavailableError if a peer is gone, or silent for the timeout of the rendezvous.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.weights.rendezvous import TRAINER_RANK, Rendezvous

log = logging.getLogger(__name__)

STORE_SECONDS = 30.0
"""Timeout of one operation on the trainer's own TCP store."""
REACH_SECONDS = 5.0
"""Timeout to connect to the trainer's store. It listens before replicas are told its address."""
_BACKLOG = 128
_GO, _ABORTED = "go", "aborted"


class Sender:
    """The trainer's end (rank 0). Its TCP store listens until `close` and serves all epochs."""

    def __init__(self, host: str) -> None:
        """`host` is the address at which replicas reach this machine. Raises FailedPreconditionError if it is not."""
        self.host = host
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

    def group(self, rendezvous: Rendezvous) -> "Group":
        """Return the group of the epoch: the open one, or a new one that joins at its first use."""
        if self._group is None or self.open_epoch != rendezvous.epoch:
            self.close_group()
            self._group = Group(rendezvous, lambda: (cloned(self._store), self.host))
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

    def __init__(self) -> None:
        self._group: Group | None = None

    def group(self, rendezvous: Rendezvous) -> "Group":
        """Return the group of the epoch: the open one, or a new one that joins at its first use."""
        if self._group is None or not self._group.is_open or self._group.epoch != rendezvous.epoch:
            self.close_group()
            self._group = Group(rendezvous, lambda: _reached_store(rendezvous))
        return self._group

    def close_group(self) -> None:
        """Leave the open group, if there is one. Its other members notice."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class Group:
    """The process group of one epoch. `send` and `receive` block; `abort` may be called from another thread.

    A group that failed or was aborted stays closed: the next sync needs a new epoch.
    """

    def __init__(self, rendezvous: Rendezvous, open_store: Callable[[], tuple[TCPStore, str]]) -> None:
        """`open_store` returns a connection to the TCP store, and the address of this process for its peers."""
        self._rendezvous = rendezvous
        self._open_store = open_store
        self._store: TCPStore | None = None
        self._process_group: Any = None
        self._wake = threading.Event()
        self._is_closed = False

    @property
    def epoch(self) -> int:
        """The membership epoch."""
        return self._rendezvous.epoch

    @property
    def is_open(self) -> bool:
        """False once it has failed or was aborted."""
        return not self._is_closed

    def send(self, buffers: Sequence[Tensor]) -> None:
        """Broadcast packed buckets, each uint8 of shape [nbytes], to all other members."""
        with self._closed_on_failure():
            self._join()
            for buffer in buffers:
                self._broadcast(buffer)

    def receive(self, buffers: Sequence[Tensor]) -> None:
        """Receive the trainer's buckets into `buffers`, each uint8 of shape [nbytes]."""
        with self._closed_on_failure():
            self._join()
            for buffer in buffers:
                self._broadcast(buffer)

    def abort(self) -> None:
        """Close the group, which ends a blocking call in it. The trainer also ends the wait of members that join."""
        self._is_closed = True
        self._wake.set()
        if self._rendezvous.rank == TRAINER_RANK and self._store is not None and self._process_group is None:
            # A clone, because the call that waits for the verdict blocks the connection itself.
            self._keys(cloned(self._store)).compare_set("verdict", "", _ABORTED)
        self._process_group = None

    def _join(self) -> None:
        """Wait for all members, then connect to each.

        Members wait for the verdict in the store before Gloo connects, because Gloo's own wait cannot be aborted.
        """
        if self._process_group is not None:
            return
        self._store, host = self._open_store()
        keys, timeout = self._keys(self._store), timedelta(seconds=self._rendezvous.timeout_seconds)
        if keys.add("joined", 1) == self._rendezvous.world_size:
            keys.compare_set("verdict", "", _GO)
        self._refuse_if_closed()
        keys.wait(["verdict"], timeout)
        if keys.get("verdict").decode() != _GO:
            raise UnavailableError(f"weights: the trainer aborted epoch {self.epoch}")
        self._process_group = _gloo_group(keys, self._rendezvous, host, timeout)

    def _broadcast(self, buffer: Tensor) -> None:
        process_group, done = self._process_group, threading.Event()
        self._wake = done
        self._refuse_if_closed()
        options = BroadcastOptions()
        options.rootRank = TRAINER_RANK
        work = process_group.broadcast([buffer], options)
        future = work.get_future()
        future.add_done_callback(lambda _: done.set())
        done.wait()  # at most for the timeout of the group
        if not future.done():
            _abandon(process_group, work)
            self._refuse_if_closed()
        future.wait()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise UnavailableError(f"weights: the transfer of epoch {self.epoch} was aborted")

    def _keys(self, store: TCPStore) -> PrefixStore:
        return PrefixStore(f"nexrl/weights/{self.epoch}", store)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # raised by torch.distributed if a peer or the store is gone or silent
            self._is_closed, self._process_group = True, None
            raise UnavailableError(f"weights: transfer of epoch {self.epoch}: {str(error).splitlines()[0]}") from error
        except BaseException:
            self._is_closed, self._process_group = True, None
            raise


def cloned(store: TCPStore) -> TCPStore:
    """Return another connection to the same store: a call that waits blocks its connection for other threads."""
    clone: TCPStore = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    return clone


def _gloo_group(store: PrefixStore, rendezvous: Rendezvous, host: str, timeout: timedelta) -> Any:
    # Constructed directly: init_process_group would change the default group of the trainer or the engine.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rendezvous.rank, rendezvous.world_size, options)


def _abandon(process_group: Any, work: Any) -> None:
    """Keep an aborted broadcast in a thread until it ends. Gloo cannot cancel it, and freeing the group would block."""

    def outlive() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            log.info("an abandoned broadcast of %s ended: %s", process_group, error)

    threading.Thread(target=outlive, name="abandoned-broadcast", daemon=True).start()


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
