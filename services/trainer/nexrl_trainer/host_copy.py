"""Copies of tensors in host memory. Training goes on while a copy is written to disk."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Copies tensors to host memory, and keeps that memory for the next copy: to get it anew can take as long."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return copies on the CPU, which overwrite those of the call before. Takes one tensor after the other."""
        self._kept = {name: self._memory(name, tensor).copy_(tensor.detach()) for name, tensor in tensors}
        return self._kept

    def _memory(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype)
