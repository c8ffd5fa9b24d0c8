"""Gathers the packed buckets of a module that is sharded over several trainer ranks (FSDP2), one after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nexrl.weights.manifest import Bucket, Manifest, buckets
from nexrl.weights.packing import Snapshot, allocate_bucket, digest, layout_of, pack, reusable

_HOST = torch.device("cpu")


def gathered_snapshot(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    policy_version: int,
    bucket_bytes: int,
    is_sender: bool,
    replaced: Snapshot | None = None,
    device: torch.device = _HOST,
) -> Snapshot | None:
    """Return on the sender what `packing.snapshot` returns of tensors that are not sharded, and None on other ranks.

    All ranks of the tensors' mesh must call this with the same arguments. Only the sender needs the last two.
    """
    tensors = dict(named_tensors)
    layout = layout_of(tensors.items(), policy_version=policy_version, bucket_bytes=bucket_bytes)
    free = list(reusable(replaced, layout, device))

    def allocated(bucket: Bucket) -> Tensor:
        return free.pop(0) if free else allocate_bucket(bucket, device)

    gathered = gathered_buckets(layout, tensors, is_sender=is_sender, allocate=allocated)
    buffers = tuple(buffer for buffer in gathered if buffer is not None)
    return Snapshot(replace(layout, digest=digest(layout, buffers)), buffers) if is_sender else None


def gathered_buckets(
    layout: Manifest,
    tensors: Mapping[str, Tensor],
    *,
    is_sender: bool,
    allocate: Callable[[Bucket], Tensor] = allocate_bucket,
) -> Iterator[Tensor | None]:
    """Yield the packed buckets of `layout` on the sender (uint8, shape [nbytes]), and None on other ranks.

    All ranks of the tensors' mesh must call this with the same layout (`packing.layout_of`) and take every item: each
    step is a collective. `tensors` may be sharded or whole. `allocate` returns the memory of a bucket, on any device. A
    rank holds one gathered tensor at a time. The sender also holds the current bucket, and earlier ones only if the
    caller keeps them.
    """
    for bucket in buckets(layout):
        if is_sender:
            yield pack(bucket, lambda name: _whole(tensors[name]), allocate(bucket))
        else:
            for placement in bucket.placements:
                _whole(tensors[placement.tensor.name])
            yield None


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. This is a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
