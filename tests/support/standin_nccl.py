"""A stand-in for NCCL between processes without GPUs, for tests of what is around NCCL. It proves nothing of NCCL.

Ranks exchange buffers as files in a folder, whose path is the unique id. As with NCCL's kernels, no rank notices that
another one is dead or silent: `is_idle` stays False until somebody aborts.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nexrl.weights import nccl
from nexrl.weights.gpu import Gpu


def standin_gpu(uuid: str) -> Gpu:
    """Return a "GPU" in host memory."""
    return Gpu(torch.device("cpu"), uuid)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process use the stand-in, and name its communicators by folders in `folder`."""
    names = (str(folder / f"communicator-{number}").encode() for number in itertools.count())
    monkeypatch.setattr(nccl, "Communicator", StandInCommunicator)
    monkeypatch.setattr(nccl, "new_unique_id", lambda: next(names))


class StandInCommunicator:
    """See `nexrl.weights.nccl_communicator.Communicator`."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        self._folder = Path(unique_id.decode())
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rank, self._world_size = rank, world_size
        self._broadcasts = 0
        self._receiving: Tensor | None = None
        self._awaited = self._written("joined", range(world_size))
        self._write(f"joined.{rank}")

    def is_idle(self) -> bool:
        """Return whether every other rank has done its part."""
        if not all(path.exists() for path in self._awaited):
            return False
        if self._receiving is not None:
            content = bytearray((self._folder / f"content.{self._broadcasts}").read_bytes())
            self._receiving.copy_(torch.frombuffer(content, dtype=torch.uint8))
            self._receiving = None
            self._write(f"received-{self._broadcasts}.{self._rank}")
        return True

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """Begin to write `buffer` to a file, or to read one into it."""
        self._broadcasts += 1
        content = f"content.{self._broadcasts}"
        if self._rank == root:
            others = (rank for rank in range(self._world_size) if rank != root)
            self._awaited = self._written(f"received-{self._broadcasts}", others)
            self._write(content, buffer.numpy().tobytes())
        else:
            self._receiving, self._awaited = buffer, [self._folder / content]

    def abort(self) -> None:
        """Leave a note for the test."""
        self._write(f"aborted.{self._rank}")

    def _written(self, name: str, ranks: Iterable[int]) -> list[Path]:
        return [self._folder / f"{name}.{rank}" for rank in ranks]

    def _write(self, name: str, content: bytes = b"") -> None:
        partial = self._folder / f".{name}.{self._rank}"
        partial.write_bytes(content)
        partial.rename(self._folder / name)
