"""Packed buckets in memory that other processes of this user can map: the replica receives, vLLM's workers load."""

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
    """The buckets of a manifest in an anonymous file (memfd_create(2)), followed by the verdicts of the workers.

    The file has no name, so that a killed process leaves nothing behind. `path` is valid while this object lives; a
    mapping lasts as long as its tensors.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._file = os.memfd_create("nexrl-weights")
        weakref.finalize(self, os.close, self._file)
        self._verdicts_at = sum(bucket.nbytes for bucket in buckets(manifest))
        os.ftruncate(self._file, self._verdicts_at + MAX_WORKERS * VERDICT_BYTES)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._buffers = open_shared(self.path, manifest)

    def verdicts(self, workers: int) -> list[str]:
        """Return what the workers of rank 0 to `workers` - 1 wrote with `write_verdict`; "" for none."""
        said = os.pread(self._file, workers * VERDICT_BYTES, self._verdicts_at)
        places = range(0, len(said), VERDICT_BYTES)
        return [said[at : at + VERDICT_BYTES].rstrip(b"\0").decode(errors="replace") for at in places]

    def forget_verdicts(self) -> None:
        """Clear the verdicts, before the next load."""
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
    """Write the result of a worker's load, LOADED or the error, into the file of the weights.

    vLLM does not pass on the answers of all workers: of several engines only the first one's, and of several workers
    that fail together one at once and the others as answers to later calls.
    """
    at = sum(bucket.nbytes for bucket in buckets(manifest)) + rank * VERDICT_BYTES
    with pathlib.Path(path).open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), verdict.encode()[:VERDICT_BYTES], at)


def open_shared(path: str, manifest: Manifest) -> Sequence[Tensor]:
    """Return the buckets of `manifest` (uint8, shape [nbytes] each) in the file at `path`, mapped, not copied."""
    sizes = [bucket.nbytes for bucket in buckets(manifest)]
    mapped = torch.from_file(path, shared=True, size=sum(sizes), dtype=torch.uint8)
    return tuple(mapped.split(sizes))


def manifest_to_json(manifest: Manifest) -> str:
    """Return the manifest as JSON, for a process that opens its buckets."""
    tensors = [[tensor.name, tensor.data_type, tensor.shape] for tensor in manifest.tensors]
    return json.dumps([manifest.policy_version, tensors, manifest.bucket_bytes, manifest.digest])


def manifest_from_json(text: str) -> Manifest:
    """Return the manifest that `manifest_to_json` wrote."""
    fields: tuple[int, list[Any], int, str] = json.loads(text)
    policy_version, tensors, bucket_bytes, digest = fields
    specs = tuple(TensorSpec(name, data_type, tuple(shape)) for name, data_type, shape in tensors)
    return Manifest(policy_version, specs, bucket_bytes, digest)
