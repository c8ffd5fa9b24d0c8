"""Safetensors files in which each rank writes its slices of tensors, and from which a rank reads only what it needs.

The metadata of such a file says of each slice how large the whole tensor is, and where in it the slice begins.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nexrl.errors import FailedPreconditionError

_SLICES = "slices"


@dataclass(frozen=True)
class Slice:
    """A part of a tensor of this `shape`: all elements from `offset` on that fit into `tensor`."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def own_slice(tensor: Tensor) -> Slice:
    """Return this rank's part of a tensor, which shares its memory: all of it unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return Slice(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Slice(tensor.to_local(), tuple(tensor.shape), tuple(offset))


def write_slices(file: Path, slices: Mapping[str, Slice]) -> None:
    """Write this rank's slices on the CPU. Those without elements are left out."""
    kept = {name: part for name, part in slices.items() if part.tensor.numel()}
    places = {name: {"shape": part.shape, "offset": part.offset} for name, part in kept.items()}
    save_file({name: part.tensor for name, part in kept.items()}, file, metadata={_SLICES: json.dumps(places)})


@dataclass(frozen=True)
class _Part:
    """A slice that was saved. `source` is indexed like a tensor, and read then."""

    source: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


class SavedTensors(Mapping[str, str]):
    """Tensors by name, each in one or several slices. The value of a name is dtype and shape of the whole tensor."""

    def __init__(self, origin: Path) -> None:
        """`origin` is named in errors."""
        self.origin = origin
        self._parts: dict[str, list[_Part]] = {}

    @classmethod
    def in_files(cls, origin: Path, files: Iterable[Path]) -> Self:
        """Return the tensors of safetensors files, of which nothing is read yet."""
        found = cls(origin)
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            places = json.loads((opened.metadata() or {}).get(_SLICES, "{}"))
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                found._add(name, opened, places.get(name))
        return found

    @classmethod
    def of(cls, origin: Path, tensors: Mapping[str, Tensor]) -> Self:
        """Return whole tensors in memory."""
        found = cls(origin)
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            found._parts[name] = [_Part(tensor, shape, (0,) * tensor.ndim, shape, tensor.dtype)]
        return found

    def __getitem__(self, name: str) -> str:
        part = self._parts[name][0]
        return kind(part.dtype, part.shape)

    def __iter__(self) -> Any:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor, or this rank's slice of it, into `tensor`. Raises FailedPreconditionError if they differ."""
        own, filled = own_slice(tensor), 0
        for part in self._parts.get(name, []):
            begins = [max(pair) for pair in zip(own.offset, part.offset, strict=True)]
            ends = [
                min(pair)
                for pair in zip(_ends(own.offset, own.tensor.shape), _ends(part.offset, part.size), strict=True)
            ]
            if part.shape == own.shape and all(begin < end for begin, end in zip(begins, ends, strict=True)):
                target = own.tensor[_between(begins, ends, own.offset)]
                target.copy_(part.source[_between(begins, ends, part.offset)])
                filled += target.numel()
        if filled != own.tensor.numel():
            raise self._mismatch(name, tensor)

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise FailedPreconditionError unless there is a tensor of this name, type and whole shape."""
        if self.get(name) != kind(tensor.dtype, tensor.shape):
            raise self._mismatch(name, tensor)

    def below(self, prefix: str) -> Self:
        """Return the tensors whose names begin with `prefix`, by the rest of their names."""
        found = type(self)(self.origin)
        names = [name for name in self._parts if name.startswith(prefix)]
        found._parts = {name.removeprefix(prefix): self._parts[name] for name in names}
        return found

    def _mismatch(self, name: str, tensor: Tensor) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"checkpoint {self.origin}: {name} is {self.get(name, 'nothing')} or not complete, not "
            f"{kind(tensor.dtype, tensor.shape)}; use a checkpoint of this model"
        )

    def _add(self, name: str, opened: Any, place: Mapping[str, Any] | None) -> None:
        lazy = opened.get_slice(name)
        size = tuple(lazy.get_shape())
        source: Any = lazy if size else opened.get_tensor(name)  # a number has no slices
        dtype = (lazy[:0] if size else source).dtype
        shape, offset = (tuple(place["shape"]), tuple(place["offset"])) if place else (size, (0,) * len(size))
        self._parts.setdefault(name, []).append(_Part(source, shape, offset, size, dtype))


def kind(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Return how messages call a tensor."""
    return f"{dtype} {tuple(shape)}"


def _ends(offset: Iterable[int], size: Iterable[int]) -> list[int]:
    return [begin + length for begin, length in zip(offset, size, strict=True)]


def _between(begins: Iterable[int], ends: Iterable[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - o, end - o) for begin, end, o in zip(begins, ends, offset, strict=True))
