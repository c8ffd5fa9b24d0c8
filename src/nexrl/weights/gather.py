"""Packed buckets of a module that is sharded over several trainer ranks (FSDP2), gathered one after the other."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nexrl.weights.manifest import Manifest, buckets
from nexrl.weights.packing import allocate_bucket, pack


def gathered_buckets(layout: Manifest, tensors: Mapping[str, Tensor], *, is_sender: bool) -> Iterator[Tensor | None]:
    """The packed buckets of `layout` (uint8, shape [nbytes], on the CPU) on the sender, None for each elsewhere.

    Every rank of the tensors' mesh must call it with the same layout (`packing.layout_of`) and take all there is: each
    step is a collective. `tensors` may be sharded or whole. A rank holds one gathered tensor at a time, the sender also
    the bucket that it is copied into; whoever drops a bucket before taking the next holds no other.
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
    """The tensor with all its elements; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
