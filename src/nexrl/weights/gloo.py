"""A broadcast between host memories, by a torch.distributed process group of its own, never the default group."""

import logging
import threading
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo

from nexrl.weights.rendezvous import TRAINER_RANK, Rendezvous

log = logging.getLogger(__name__)


class GlooChannel:
    """See `nexrl.weights.transport.Channel`."""

    def __init__(self, keys: PrefixStore, rendezvous: Rendezvous, host: str) -> None:
        """`keys` are those of the epoch. `host` is the address of this process for its peers."""
        self._keys = keys
        self._rendezvous = rendezvous
        self._host = host
        self._process_group: Any = None
        self._wake = threading.Event()
        self._is_aborted = False

    def connect(self) -> None:
        """Connect to all members."""
        # Constructed directly: init_process_group would change the default group of the trainer or the engine.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._rendezvous.timeout_seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        self._process_group = ProcessGroupGloo(self._keys, rank, world_size, options)

    def broadcast(self, buffer: Tensor) -> None:
        """Send `buffer`, or receive into it; then it must be in host memory."""
        process_group, done = self._process_group, threading.Event()
        self._wake = done
        if self._is_aborted:
            raise RuntimeError("it was aborted")
        options = BroadcastOptions()
        options.rootRank = TRAINER_RANK
        work = process_group.broadcast([buffer.cpu()], options)
        future = work.get_future()
        future.add_done_callback(lambda _: done.set())
        done.wait()  # at most for the timeout of the group
        if not future.done():
            _abandon(process_group, work)
            raise RuntimeError("it was aborted")
        future.wait()

    def abort(self) -> None:
        """End a running call, and leave the group."""
        self._is_aborted = True
        self._wake.set()
        self._process_group = None


def _abandon(process_group: Any, work: Any) -> None:
    """Keep an aborted broadcast in a thread until it ends. Gloo cannot cancel it, and freeing the group would block."""

    def outlive() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            log.info("an abandoned broadcast of %s ended: %s", process_group, error)

    threading.Thread(target=outlive, name="abandoned-broadcast", daemon=True).start()
