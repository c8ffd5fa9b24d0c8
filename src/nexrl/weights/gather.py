"""Gathers the packed buckets of a module that is sharded over several trainer ranks (FSDP2), one after the other."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nexrl.weights.manifest import Manifest, buckets
from nexrl.weights.packing import Snapshot, allocate_bucket, digest, layout_of, pack


def gathered_snapshot(
    named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, bucket_bytes: int, is_sender: bool
) -> Snapshot | None:
    """Return on the sender what `packing.snapshot` returns of tensors that are not sharded, and None on other ranks.

    All ranks of the tensors' mesh must call this with the same arguments.
    """
    tensors = dict(named_tensors)
    layout = layout_of(tensors.items(), policy_version=policy_version, bucket_bytes=bucket_bytes)
    gathered = gathered_buckets(layout, tensors, is_sender=is_sender)
    buffers = tuple(buffer for buffer in gathered if buffer is not None)
    return Snapshot(replace(layout, digest=digest(layout, buffers)), buffers) if is_sender else None


def gathered_buckets(layout: Manifest, tensors: Mapping[str, Tensor], *, is_sender: bool) -> Iterator[Tensor | None]:
    """Yield the packed buckets of `layout` on the sender (uint8, shape [nbytes], on the CPU), and None on other ranks.

    All ranks of the tensors' mesh must call this with the same layout (`packing.layout_of`) and take every item: each
    step is a collective. `tensors` may be sharded or whole. A rank holds one gathered tensor at a time. The sender
    also holds the current bucket, and earlier ones only if the caller keeps them.
    """
    for bucket in buckets(layout):
        if is_sender:
            yield pack(bucket, lambda name: _whole(tensors[name]), allocate_bucket(bucket))
        else:
            for placement in bucket.placements:
                _whole(tensors[placement.tensor.name])
            yield None


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. This is a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
