"""Packs tensors into buckets of bytes, and unpacks them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from nexrl.errors import InvalidArgumentError
from nexrl.weights.manifest import ITEM_BYTES, Bucket, Manifest, TensorSpec, buckets, digest_of

log = logging.getLogger(__name__)

_NO_DIGEST = "0" * 64
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Snapshot:
    """A packed copy of one policy version: `buffers[i]` (uint8, shape [nbytes]) holds bucket i of `manifest`.

    Each is in host memory or on a device.
    """

    manifest: Manifest
    buffers: tuple[Tensor, ...]

    def of_base(self, digest: str) -> "Snapshot":
        """Return the same copy as one of an adapter for the base with this digest; "" if it is of no adapter."""
        return Snapshot(replace(self.manifest, base_digest=digest), self.buffers)


def snapshot(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    policy_version: int,
    bucket_bytes: int,
    replaced: Snapshot | None = None,
    device: torch.device = _HOST,
) -> Snapshot:
    """Copy tensors, on any device, into packed buckets on `device`, and compute their digest.

    The memory of `replaced` is reused if it fits, because allocating takes longer than copying. The caller must not use
    `replaced` afterwards. Raises InvalidArgumentError for a data type that cannot be sent, or a duplicate name.
    """
    named_tensors = list(named_tensors)
    layout = layout_of(named_tensors, policy_version=policy_version, bucket_bytes=bucket_bytes)
    tensors = dict(named_tensors)
    buffers = reusable(replaced, layout, device) or tuple(allocate(layout, device))
    for bucket, buffer in zip(buckets(layout), buffers, strict=True):
        pack(bucket, tensors.__getitem__, buffer)
    return Snapshot(replace(layout, digest=digest(layout, buffers)), buffers)


def layout_of(named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, bucket_bytes: int) -> Manifest:
    """Return the manifest of tensors whose digest is not known yet, with zeros instead."""
    return Manifest(policy_version, tensor_specs(named_tensors), bucket_bytes, _NO_DIGEST)


def tensor_specs(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Return the manifest's entry of each tensor. Raises InvalidArgumentError for a data type that cannot be sent."""
    specs = []
    for name, tensor in named_tensors:
        data_type = str(tensor.dtype).removeprefix("torch.")
        if data_type not in ITEM_BYTES:
            raise InvalidArgumentError(f"weights: {name}: data type {data_type}; allowed: {', '.join(ITEM_BYTES)}")
        specs.append(TensorSpec(name, data_type, tuple(tensor.shape)))
    return tuple(specs)


def allocate(manifest: Manifest, device: torch.device = _HOST) -> list[Tensor]:
    """Return buffers for the packed buckets of `manifest`: uint8, shape [nbytes] each.

    They are zeroed because the padding is sent, too, and must not reveal old memory of this process.
    """
    return [allocate_bucket(bucket, device) for bucket in buckets(manifest)]


def allocate_bucket(bucket: Bucket, device: torch.device = _HOST) -> Tensor:
    """Return a zeroed buffer for one bucket. It is in host memory if that of `device` is full."""
    try:
        return torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        log.warning("weights: the memory of %s is full: %d bytes are kept in host memory", device, bucket.nbytes)
        return torch.zeros(bucket.nbytes, dtype=torch.uint8)


def reusable(replaced: Snapshot | None, layout: Manifest, device: torch.device) -> tuple[Tensor, ...]:
    """Return the buffers of `replaced` if they fit `layout` and are on `device`; else none."""
    if replaced is None or not fits(replaced.buffers, layout):
        return ()
    return replaced.buffers if all(buffer.device == device for buffer in replaced.buffers) else ()


def fits(buffers: Sequence[Tensor], manifest: Manifest) -> bool:
    """Return whether `buffers` have the sizes of the packed buckets of `manifest`."""
    return [buffer.numel() for buffer in buffers] == [bucket.nbytes for bucket in buckets(manifest)]


def pack(bucket: Bucket, tensor: Callable[[str], Tensor], buffer: Tensor) -> Tensor:
    """Fill `buffer` with the packed bucket and return it. Calls `tensor` once per name, and keeps no result."""
    for placement in bucket.placements:
        _view(buffer, placement.tensor, placement.offset).copy_(tensor(placement.tensor.name).detach())
    return buffer


def unpack(manifest: Manifest, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of packed buckets by name, as views of `buffers`."""
    return {
        placement.tensor.name: _view(buffer, placement.tensor, placement.offset)
        for bucket, buffer in zip(buckets(manifest), buffers, strict=True)
        for placement in bucket.placements
    }


def digest(manifest: Manifest, buffers: Sequence[Tensor]) -> str:
    """Return the digest of the tensors in packed buckets, without padding (`digest_of`). It is computed on the host."""
    return digest_of(chunk for _, chunk, _ in named_chunks(manifest, buffers))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor on the CPU as bytes. They are copied only if they are not contiguous."""
    return memoryview(cast(Any, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))


def named_chunks(manifest: Manifest, buffers: Sequence[Tensor]) -> Iterator[tuple[str, memoryview, Tensor]]:
    """Yield name, bytes and view of each tensor in packed buckets, in the manifest's order.

    The bytes are those in the bucket itself if it is in host memory, and a copy if it is on a device.
    """
    for bucket, buffer in zip(buckets(manifest), buffers, strict=True):
        # NumPy arrays are buffers, but its type stubs do not say so.
        content = memoryview(cast(Any, buffer.cpu().numpy()))
        for placement in bucket.placements:
            tensor = placement.tensor
            yield tensor.name, content[placement.offset : placement.end], _view(buffer, tensor, placement.offset)


def _view(buffer: Tensor, tensor: TensorSpec, offset: int) -> Tensor:
    content = buffer[offset : offset + tensor.nbytes]
    return content.view(getattr(torch, tensor.data_type)).view(tensor.shape)
