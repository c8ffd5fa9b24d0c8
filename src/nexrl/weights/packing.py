"""Tensors <-> packed buckets of bytes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


def snapshot(named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, bucket_bytes: int) -> Snapshot:
    """Copy tensors, on whatever device, into packed buckets on the CPU, and take their digest.

    Raises InvalidArgumentError for a data type that cannot be sent or a name that appears twice.
    """
    named_tensors = list(named_tensors)
    layout = Manifest(policy_version, tensor_specs(named_tensors), bucket_bytes, _NO_DIGEST)
    tensors = dict(named_tensors)
    buffers = tuple(_packed(bucket, tensors) for bucket in buckets(layout))
    return Snapshot(Manifest(policy_version, layout.tensors, bucket_bytes, digest(layout, buffers)), buffers)


def tensor_specs(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """What a manifest says of each tensor. Raises InvalidArgumentError for a data type that cannot be sent."""
    specs = []
    for name, tensor in named_tensors:
        data_type = str(tensor.dtype).removeprefix("torch.")
        if data_type not in ITEM_BYTES:
            raise InvalidArgumentError(f"weights: {name}: data type {data_type}; allowed: {', '.join(ITEM_BYTES)}")
        specs.append(TensorSpec(name, data_type, tuple(tensor.shape)))
    return tuple(specs)


def unpack(manifest: Manifest, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of packed buckets, as views of `buffers`."""
    return {
        placement.tensor.name: _view(buffer, placement.tensor, placement.offset)
        for bucket, buffer in zip(buckets(manifest), buffers, strict=True)
        for placement in bucket.placements
    }


def digest(manifest: Manifest, buffers: Sequence[Tensor]) -> str:
    """Digest of the tensors in packed buckets: `digest_of` their bytes, padding left out."""
    return digest_of(_chunks(manifest, buffers))


def _chunks(manifest: Manifest, buffers: Sequence[Tensor]) -> Iterator[memoryview]:
    for bucket, buffer in zip(buckets(manifest), buffers, strict=True):
        content = memoryview(cast(Any, buffer.numpy()))  # numpy's arrays are buffers, its type stubs do not say so
        for placement in bucket.placements:
            yield content[placement.offset : placement.end]


def _packed(bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)  # zeros: padding must not carry this process's old memory
    for placement in bucket.placements:
        _view(buffer, placement.tensor, placement.offset).copy_(tensors[placement.tensor.name].detach())
    return buffer


def _view(buffer: Tensor, tensor: TensorSpec, offset: int) -> Tensor:
    content = buffer[offset : offset + tensor.nbytes]
    return content.view(getattr(torch, tensor.data_type)).view(tensor.shape)
