"""The manifest of a policy version, and the rule by which both sides pack its tensors into buckets."""

import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from nexrl.errors import InvalidArgumentError, Violation

ALIGNMENT_BYTES = 16
"""Each tensor begins at a multiple of this in its bucket, so that a view of any element type is possible."""

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "bool": 1}
"""Size of one element in bytes, by data type as torch names it."""

_MAX_VIOLATIONS = 8


@dataclass(frozen=True)
class TensorSpec:
    """Name (Hugging Face state dict), element type (a key of ITEM_BYTES) and shape of one tensor."""

    name: str
    data_type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the elements, without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.data_type]

    def __str__(self) -> str:
        return f"{self.data_type}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Manifest:
    """One policy version: its tensors in broadcast order, the size of a bucket, and the digest of the tensors' bytes.

    If the tensors are those of an adapter, `base_digest` is that of the base that it belongs to
    (`nexrl.adapters.digest_of_base`).

    Raises InvalidArgumentError if it could not be packed or verified.
    """

    policy_version: int
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    digest: str
    base_digest: str = ""

    def __post_init__(self) -> None:
        violations = list(_violations(self))
        if violations:
            raise InvalidArgumentError(f"manifest: {violations[0]}", violations=violations[:_MAX_VIOLATIONS])

    @property
    def nbytes(self) -> int:
        """Size of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Placement:
    """A tensor and its offset in its bucket, in bytes."""

    tensor: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.offset + self.tensor.nbytes


@dataclass(frozen=True)
class Bucket:
    """Tensors that are broadcast together."""

    nbytes: int
    placements: tuple[Placement, ...]


def buckets(manifest: Manifest) -> Iterator[Bucket]:
    """Yield the buckets: tensors in the manifest's order, up to `bucket_bytes` each. A larger tensor has its own."""
    placements: list[Placement] = []
    end = 0
    for tensor in manifest.tensors:
        padded = _padded(tensor.nbytes)
        if placements and end + padded > manifest.bucket_bytes:
            yield Bucket(end, tuple(placements))
            placements, end = [], 0
        placements.append(Placement(tensor, end))
        end += padded
    if placements:
        yield Bucket(end, tuple(placements))


def digest_of(chunks: Iterable[memoryview]) -> str:
    """Return the BLAKE3 digest, in hexadecimal, of the tensors' bytes one after the other, without padding."""
    digest = blake3()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def refuse_other_base(manifest: Manifest, base_digest: str) -> None:
    """Raise InvalidArgumentError if the adapter in `manifest` is for another base than the one with `base_digest`."""
    if manifest.base_digest != base_digest:
        raise InvalidArgumentError(
            f"base_digest: the adapter belongs to a base with digest {manifest.base_digest or 'none'}, and this "
            f"replica's model.path and model.lora have {base_digest or 'none'}; start both with the same model"
        )


def refuse_misfit(manifest: Manifest, expected: Sequence[TensorSpec]) -> None:
    """Raise InvalidArgumentError, with the differing tensors, if `manifest` does not fit the `expected` model."""
    sent = {tensor.name: tensor for tensor in manifest.tensors}
    wanted = {tensor.name: tensor for tensor in expected}
    if sent == wanted:
        return
    violations = [Violation(name, "missing from the manifest") for name in wanted.keys() - sent.keys()]
    violations += [Violation(name, "not a tensor of this model") for name in sent.keys() - wanted.keys()]
    violations += [
        Violation(name, f"is {sent[name]}, this model has {wanted[name]}")
        for name in sent.keys() & wanted.keys()
        if sent[name] != wanted[name]
    ]
    violations.sort(key=lambda violation: violation.field)
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    raise InvalidArgumentError(
        f"the weights do not fit the model: {violations[0]}{more}", violations=violations[:_MAX_VIOLATIONS]
    )


def _padded(nbytes: int) -> int:
    # At least one unit, also for an empty tensor: no bucket is empty, and no two tensors have the same offset.
    return max(1, math.ceil(nbytes / ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _violations(manifest: Manifest) -> Iterator[Violation]:
    if manifest.policy_version < 0:
        yield Violation("policy_version", f"{manifest.policy_version}: must not be negative")
    if manifest.bucket_bytes <= 0:
        yield Violation("bucket_bytes", f"{manifest.bucket_bytes}: must be above 0")
    if len(manifest.digest) != 64 or not set(manifest.digest) <= set(string.hexdigits.lower()):
        yield Violation("digest", f"{manifest.digest[:80]!r}: must be a BLAKE3 digest in lower-case hexadecimal")
    if not manifest.tensors:
        yield Violation("tensors", "must not be empty")
    names: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.name in names:
            yield Violation(tensor.name, "appears twice")
        names.add(tensor.name)
        if tensor.data_type not in ITEM_BYTES:
            yield Violation(tensor.name, f"data type {tensor.data_type!r}; allowed: {', '.join(ITEM_BYTES)}")
        if any(length < 0 for length in tensor.shape):
            yield Violation(tensor.name, f"shape {tensor.shape}: no length may be negative")
