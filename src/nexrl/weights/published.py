"""Policy versions in a folder that trainer and replicas share: for a replica that joins late, or lost its weights.

    <path>/<experiment>/<model tag>/version_<n>/
        model.safetensors              the tensors
        manifest.json                  policy version, tensors, digest: what the tensors must be, to be loaded
    <path>/<experiment>/<model tag>/.version_<n>.<random>.tmp    being written or removed; never read

A version is written under a name of its own, forced to disk, and renamed: a kill at any instruction leaves all of it or
nothing. The folder does not say which version is committed: a reader is told version and digest by weight sync.
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

from nexrl.durable import force_to_disk
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from nexrl.spec import Experiment
from nexrl.weights.manifest import ITEM_BYTES, Manifest, TensorSpec
from nexrl.weights.packing import Snapshot, digest, named_chunks

KEPT_VERSIONS = 2
"""The newest, and the one before it, which a replica may still be reading."""
ABANDONED_SECONDS = 3600.0
"""What has had a temporary name for longer was left by a trainer that was killed: no version takes as long to write."""

_MODEL = "model.safetensors"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"version_(\d+)")
_DATA_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", "int64": "I64", "bool": "BOOL"}


class PublishedVersions:
    """The published versions of one model tag. The methods block; several processes may use a folder at a time."""

    def __init__(self, path: Path, model_tag: str) -> None:
        """`path`: the folder of one experiment; made by the first `write`."""
        self._folder = path / model_tag

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Those of an experiment, for trainer and replicas alike; None without spec.weightSync.path."""
        spec = experiment.spec
        path = spec.weight_sync.path
        return cls(Path(path) / experiment.metadata.name, spec.model.tag) if path else None

    def write(self, weights: Snapshot) -> None:
        """Publish a version, in place of one with its number, and remove all but the KEPT_VERSIONS written last.

        Raises UnavailableError when it cannot be written.
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
        """What is published as `policy_version`.

        Raises NotFoundError when nothing is, FailedPreconditionError when something else is, UnavailableError when the
        storage fails.
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

        Raises FailedPreconditionError when the tensors are not those of the manifest, UnavailableError when the storage
        fails; the buckets hold anything then.
        """
        path = self._version(manifest.policy_version) / _MODEL
        # Read, not mapped: where the storage is a network's, a mapped file that is removed would end the process.
        with _storage_errors(path), path.open("rb") as file:
            is_whole = _fill(file, manifest, buffers)
        if not is_whole or digest(manifest, buffers) != manifest.digest:
            raise FailedPreconditionError(f"weights: {path} is torn or of another version than its {_MANIFEST} says")

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
            self._remove(final)  # of an earlier run, or of a trainer that was here before
        force_to_disk(self._folder)

    def _prune(self) -> None:
        # By time, not by number: a trainer whose ledger has lost steps goes on with smaller numbers.
        with suppress(FileNotFoundError):  # another trainer does the same
            versions = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
            for path in sorted(versions, key=_age)[:-KEPT_VERSIONS]:
                self._remove(path)
            for leftover in self._folder.glob(".version_*.tmp"):
                if leftover.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        # Renamed first: what is half removed must not look like a version.
        aside = self._temporary(path)
        with suppress(FileNotFoundError):  # another trainer was first
            path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _age(path: Path) -> tuple[int, int]:
    # Files are only added to a version before it has its name; the number decides between two of one tick of the clock.
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
        force_to_disk(path)


def _fill(file: BufferedReader, manifest: Manifest, buffers: Sequence[Tensor]) -> bool:
    """Read the tensors into their places; False when the file does not hold exactly these."""
    chunks = {name: chunk for name, chunk, _ in named_chunks(manifest, buffers)}
    header = _header(manifest)
    if file.read(len(header)) != header:
        return False
    for tensor in _in_file_order(manifest):
        if file.readinto(chunks[tensor.name]) != tensor.nbytes:
            return False
    return not file.read(1)


def _header(manifest: Manifest) -> bytes:
    """The beginning of a safetensors file: the length of a JSON object, and the object, which says where what is."""
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
    """Large elements first: safetensors has no padding, and readers want every tensor aligned to its elements."""
    return sorted(manifest.tensors, key=lambda tensor: -ITEM_BYTES[tensor.data_type])


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"weights: {path}: {error.strerror or error}") from error
