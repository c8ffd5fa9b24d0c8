"""Tensors <-> packed buckets of bytes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from nexrl.errors import InvalidArgumentError
from nexrl.weights.manifest import ITEM_BYTES, Bucket, Manifest, TensorSpec, buckets, digest_of

_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Snapshot:
    """A copy of one policy version, packed: `buffers[i]` (uint8, shape [nbytes]) holds bucket i of `manifest`."""

    manifest: Manifest
    buffers: tuple[Tensor, ...]


def snapshot(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    policy_version: int,
    bucket_bytes: int,
    replaced: Snapshot | None = None,
) -> Snapshot:
    """Copy tensors, on whatever device, into packed buckets on the CPU, and take their digest.

    The memory of `replaced`, which nobody may need any more, is used again if it fits: new memory takes longer to get
    than to fill. Raises InvalidArgumentError for a data type that cannot be sent or a name that appears twice.
    """
    named_tensors = list(named_tensors)
    layout = layout_of(named_tensors, policy_version=policy_version, bucket_bytes=bucket_bytes)
    tensors = dict(named_tensors)
    buffers = replaced.buffers if replaced is not None and fits(replaced.buffers, layout) else tuple(allocate(layout))
    for bucket, buffer in zip(buckets(layout), buffers, strict=True):
        pack(bucket, tensors.__getitem__, buffer)
    return Snapshot(replace(layout, digest=digest(layout, buffers)), buffers)


def layout_of(named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, bucket_bytes: int) -> Manifest:
    """The manifest of tensors whose digest is not known yet: zeros stand for it."""
    return Manifest(policy_version, tensor_specs(named_tensors), bucket_bytes, _NO_DIGEST)


def tensor_specs(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """What a manifest says of each tensor. Raises InvalidArgumentError for a data type that cannot be sent."""
    specs = []
    for name, tensor in named_tensors:
        data_type = str(tensor.dtype).removeprefix("torch.")
        if data_type not in ITEM_BYTES:
            raise InvalidArgumentError(f"weights: {name}: data type {data_type}; allowed: {', '.join(ITEM_BYTES)}")
        specs.append(TensorSpec(name, data_type, tuple(tensor.shape)))
    return tuple(specs)


def allocate(manifest: Manifest) -> list[Tensor]:
    """Memory for the packed buckets of `manifest`: uint8, shape [nbytes] each.

    Zeros, because what lies between two tensors is sent, too: it must not be this process's old memory.
    """
    return [allocate_bucket(bucket) for bucket in buckets(manifest)]


def allocate_bucket(bucket: Bucket) -> Tensor:
    """Memory for one."""
    return torch.zeros(bucket.nbytes, dtype=torch.uint8)


def fits(buffers: Sequence[Tensor], manifest: Manifest) -> bool:
    """Whether `buffers` can hold the packed buckets of `manifest`."""
    return [buffer.numel() for buffer in buffers] == [bucket.nbytes for bucket in buckets(manifest)]


def pack(bucket: Bucket, tensor: Callable[[str], Tensor], buffer: Tensor) -> Tensor:
    """Fill `buffer` with the packed bucket. `tensor` is asked for each name once, and none of its answers is kept."""
    for placement in bucket.placements:
        _view(buffer, placement.tensor, placement.offset).copy_(tensor(placement.tensor.name).detach())
    return buffer


def unpack(manifest: Manifest, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of packed buckets, as views of `buffers`."""
    return {name: tensor for name, _, tensor in named_chunks(manifest, buffers)}


def digest(manifest: Manifest, buffers: Sequence[Tensor]) -> str:
    """Digest of the tensors in packed buckets: `digest_of` their bytes, padding left out."""
    return digest_of(chunk for _, chunk, _ in named_chunks(manifest, buffers))


def named_chunks(manifest: Manifest, buffers: Sequence[Tensor]) -> Iterator[tuple[str, memoryview, Tensor]]:
    """Name, bytes and view of each tensor in packed buckets, in the manifest's order."""
    for bucket, buffer in zip(buckets(manifest), buffers, strict=True):
        content = memoryview(cast(Any, buffer.numpy()))  # numpy's arrays are buffers, its type stubs do not say so
        for placement in bucket.placements:
            tensor = placement.tensor
            yield tensor.name, content[placement.offset : placement.end], _view(buffer, tensor, placement.offset)


def _view(buffer: Tensor, tensor: TensorSpec, offset: int) -> Tensor:
    content = buffer[offset : offset + tensor.nbytes]
    return content.view(getattr(torch, tensor.data_type)).view(tensor.shape)
