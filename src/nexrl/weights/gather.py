"""Gathers the packed buckets of a module that is sharded over several trainer ranks (FSDP2), one after the other."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nexrl.weights.manifest import Manifest, buckets
from nexrl.weights.packing import allocate_bucket, pack


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
