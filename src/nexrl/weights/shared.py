"""Packed buckets in memory that other processes of this user can map: what one process receives, others load."""

import json
import os
import pathlib
import weakref
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from nexrl.weights.manifest import Manifest, TensorSpec, buckets

PLUGIN = "nexrl"
"""Name of our backend of vLLM's weight transfer."""

LOADED = "loaded"
MAX_WORKERS = 64 * 64
VERDICT_BYTES = 256


class SharedBuffers(Sequence[Tensor]):
    """The buckets of a manifest, one after the other in an anonymous file (memfd_create(2)).

    The file has no name, so that a killed process leaves nothing behind: `path` is valid while this object lives. A
    mapping of it stays for as long as a tensor needs it.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._file = os.memfd_create("nexrl-weights")
        weakref.finalize(self, os.close, self._file)
        self._verdicts_at = sum(bucket.nbytes for bucket in buckets(manifest))
        os.ftruncate(self._file, self._verdicts_at + MAX_WORKERS * VERDICT_BYTES)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._buffers = open_shared(self.path, manifest)

    def verdicts(self, workers: int) -> list[str]:
        """What the workers of rank 0 to `workers` - 1 have said with `write_verdict`; "" of one that has not."""
        said = os.pread(self._file, workers * VERDICT_BYTES, self._verdicts_at)
        places = range(0, len(said), VERDICT_BYTES)
        return [said[at : at + VERDICT_BYTES].rstrip(b"\0").decode(errors="replace") for at in places]

    def forget_verdicts(self) -> None:
        """Before the workers are asked again."""
        os.pwrite(self._file, bytes(MAX_WORKERS * VERDICT_BYTES), self._verdicts_at)

    def __len__(self) -> int:
        return len(self._buffers)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._buffers[index]


def write_verdict(path: str, manifest: Manifest, rank: int, verdict: str) -> None:
    """A worker says what became of its load: LOADED, or why it failed.

    Beside the weights, because of what a worker answers vLLM passes on too little: of several engines only the first
    one's, and of several workers that fail together one now, and the others' as answers to what is asked next.
    """
    at = sum(bucket.nbytes for bucket in buckets(manifest)) + rank * VERDICT_BYTES
    with pathlib.Path(path).open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), verdict.encode()[:VERDICT_BYTES], at)


def open_shared(path: str, manifest: Manifest) -> Sequence[Tensor]:
    """The buckets of `manifest` (uint8, shape [nbytes] each) in the file at `path`, mapped, not copied."""
    sizes = [bucket.nbytes for bucket in buckets(manifest)]
    mapped = torch.from_file(path, shared=True, size=sum(sizes), dtype=torch.uint8)
    return tuple(mapped.split(sizes))


def manifest_to_json(manifest: Manifest) -> str:
    """For a process that is to open its buckets."""
    tensors = [[tensor.name, tensor.data_type, tensor.shape] for tensor in manifest.tensors]
    return json.dumps([manifest.policy_version, tensors, manifest.bucket_bytes, manifest.digest])


def manifest_from_json(text: str) -> Manifest:
    """The manifest that `manifest_to_json` wrote."""
    fields: tuple[int, list[Any], int, str] = json.loads(text)
    policy_version, tensors, bucket_bytes, digest = fields
    specs = tuple(TensorSpec(name, data_type, tuple(shape)) for name, data_type, shape in tensors)
    return Manifest(policy_version, specs, bucket_bytes, digest)
