"""Stores policy versions in a folder that trainer and replicas share, for replicas that join late or restart.

    <path>/<experiment>/<model tag>/version_<n>/
        model.safetensors              the tensors
        manifest.json                  policy version, tensors and digest, which are checked before loading
    <path>/<experiment>/<model tag>/.version_<n>.<random>.tmp    being written or removed; never read

A version is written under a temporary name, forced to disk, and renamed. It is complete or absent, even if the writer
is killed. The folder does not say which version is committed: weight sync tells readers its version and digest.
"""

import errno
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Self
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from nexrl.fsync import fsync_path
from nexrl.spec import Experiment
from nexrl.weights.manifest import ITEM_BYTES, Manifest, TensorSpec
from nexrl.weights.packing import Snapshot, digest, named_chunks

KEPT_VERSIONS = 2
"""The newest version, and the previous one, which a replica may still be reading."""
ABANDONED_SECONDS = 3600.0
"""An older temporary folder belongs to a trainer that was killed: writing a version takes less time."""

_MODEL = "model.safetensors"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"version_(\d+)")
_DATA_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", "int64": "I64", "bool": "BOOL"}


class PublishedVersions:
    """The published versions of one model tag. Methods block. Several processes may use the folder at the same time."""

    def __init__(self, path: Path, model_tag: str) -> None:
        """`path` is the folder of one experiment. The first `write` creates it."""
        self._folder = path / model_tag

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return the published versions of an experiment; None without spec.weightSync.path."""
        spec = experiment.spec
        path = spec.weight_sync.path
        return cls(Path(path) / experiment.metadata.name, spec.model.tag) if path else None

    def write(self, weights: Snapshot) -> None:
        """Write a version, replacing one of the same number. Then remove all but the KEPT_VERSIONS written last.

        Raises UnavailableError if the storage fails.
        """
        final = self._version(weights.manifest.policy_version)
        partial = self._temporary(final)
        with _storage_errors(final):
            try:
                partial.mkdir(parents=True)
                _write_files(partial, weights)
                self._put_in_place(partial, final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self._prune()

    def manifest(self, policy_version: int) -> Manifest:
        """Return the manifest of a version.

        Raises NotFoundError if the version is not there, FailedPreconditionError if its folder is wrong, and
        UnavailableError if the storage fails.
        """
        path = self._version(policy_version) / _MANIFEST
        with _storage_errors(path):
            if not path.parent.is_dir():
                raise NotFoundError(f"weights: {path.parent} does not exist")
            if not path.is_file():
                raise FailedPreconditionError(f"weights: {path.parent} is not a published version: no {_MANIFEST}")
            content = path.read_bytes()
        try:
            manifest = TypeAdapter(Manifest).validate_json(content)
        except (ValidationError, InvalidArgumentError) as error:
            reason = str(error).splitlines()[0]
            raise FailedPreconditionError(f"weights: {path} is not a manifest: {reason}") from error
        if manifest.policy_version != policy_version:
            raise FailedPreconditionError(f"weights: {path} is of version {manifest.policy_version}")
        return manifest

    def read(self, manifest: Manifest, buffers: Sequence[Tensor]) -> None:
        """Fill packed buckets (uint8, shape [nbytes] each) with the version that `manifest` describes.

        Raises FailedPreconditionError if the tensors do not match the manifest, and UnavailableError if the storage
        fails. The content of the buckets is undefined then.
        """
        path = self._version(manifest.policy_version) / _MODEL
        # Read, not mapped: on network storage, access to a mapped file that was removed kills the process.
        with _storage_errors(path), path.open("rb") as file:
            is_whole = _fill(file, manifest, buffers)
        if not is_whole or digest(manifest, buffers) != manifest.digest:
            raise FailedPreconditionError(f"weights: {path} is incomplete, or does not match its {_MANIFEST}")

    def _version(self, policy_version: int) -> Path:
        return self._folder / f"version_{policy_version}"

    def _temporary(self, path: Path) -> Path:
        return self._folder / f".{path.name}.{uuid4().hex}.tmp"

    def _put_in_place(self, partial: Path, final: Path) -> None:
        while True:
            try:
                partial.rename(final)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            self._remove(final)  # left by an earlier run, or by a previous trainer
        fsync_path(self._folder)

    def _prune(self) -> None:
        # By time, not by number: after the ledger has lost steps, the trainer continues with smaller numbers.
        with suppress(FileNotFoundError):  # another trainer prunes, too
            versions = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
            for path in sorted(versions, key=_age)[:-KEPT_VERSIONS]:
                self._remove(path)
            for leftover in self._folder.glob(".version_*.tmp"):
                if leftover.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        # Rename first: a folder that is partly removed must not look like a version.
        aside = self._temporary(path)
        with suppress(FileNotFoundError):  # another trainer removed it first
            path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _age(path: Path) -> tuple[int, int]:
    # A version does not change after its rename. The number breaks the tie between two with the same time.
    return path.stat().st_mtime_ns, int(path.name.removeprefix("version_"))


def _write_files(folder: Path, weights: Snapshot) -> None:
    manifest = weights.manifest
    chunks = {name: chunk for name, chunk, _ in named_chunks(manifest, weights.buffers)}
    with (folder / _MODEL).open("wb") as file:
        file.write(_header(manifest))
        for tensor in _in_file_order(manifest):
            file.write(chunks[tensor.name])
    (folder / _MANIFEST).write_bytes(TypeAdapter(Manifest).dump_json(manifest, indent=1))
    for path in (folder / _MODEL, folder / _MANIFEST, folder):
        fsync_path(path)


def _fill(file: BufferedReader, manifest: Manifest, buffers: Sequence[Tensor]) -> bool:
    """Read the tensors into the buffers. Return False if the file does not hold exactly these."""
    chunks = {name: chunk for name, chunk, _ in named_chunks(manifest, buffers)}
    header = _header(manifest)
    if file.read(len(header)) != header:
        return False
    for tensor in _in_file_order(manifest):
        if file.readinto(chunks[tensor.name]) != tensor.nbytes:
            return False
    return not file.read(1)


def _header(manifest: Manifest) -> bytes:
    """Return the header of a safetensors file: the length of a JSON object, and the object, which lists the tensors."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in _in_file_order(manifest):
        begin, end = end, end + tensor.nbytes
        data_type = _DATA_TYPES[tensor.data_type]
        content[tensor.name] = {"dtype": data_type, "shape": tensor.shape, "data_offsets": (begin, end)}
    encoded = json.dumps(content).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _in_file_order(manifest: Manifest) -> list[TensorSpec]:
    """Return the tensors with the largest elements first: that aligns each one, because safetensors has no padding."""
    return sorted(manifest.tensors, key=lambda tensor: -ITEM_BYTES[tensor.data_type])


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"weights: {path}: {error.strerror or error}") from error
