"""The manifest of a policy version: validation, wire format, packing into buckets, digest."""

from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError
from nexrl.v1 import policy_pb2
from nexrl.weights.manifest import ALIGNMENT_BYTES, ITEM_BYTES, Manifest, TensorSpec, buckets, digest_of, refuse_misfit
from nexrl.weights.manifest_proto import manifest_from_wire, manifest_to_wire
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.rendezvous_proto import rendezvous_from_wire, rendezvous_to_wire

DIGEST = "0" * 64

specs = st.builds(
    TensorSpec,
    name=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12),
    data_type=st.sampled_from(sorted(ITEM_BYTES)),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
manifests = st.builds(
    Manifest,
    policy_version=st.integers(0, 2**40),
    tensors=st.lists(specs, min_size=1, max_size=12, unique_by=lambda spec: spec.name).map(tuple),
    bucket_bytes=st.integers(1, 4096),
    digest=st.binary(min_size=32, max_size=32).map(bytes.hex),
)


@given(manifests)
def test_buckets_hold_every_tensor_once_in_order_aligned_and_without_overlap(manifest: Manifest) -> None:
    found = list(buckets(manifest))
    assert tuple(p.tensor for bucket in found for p in bucket.placements) == manifest.tensors
    for bucket in found:
        assert len(bucket.placements) == 1 or bucket.nbytes <= manifest.bucket_bytes
        ends = [0, *(placement.end for placement in bucket.placements)]
        for end, placement in zip(ends, bucket.placements, strict=False):
            assert placement.offset >= end
            assert placement.offset % ALIGNMENT_BYTES == 0
        assert ends[-1] <= bucket.nbytes


@given(manifests)
def test_a_bucket_ends_only_if_the_next_tensor_does_not_fit(manifest: Manifest) -> None:
    found = list(buckets(manifest))
    for bucket, following in pairwise(found):
        first = following.placements[1].offset if len(following.placements) > 1 else following.nbytes
        assert bucket.nbytes + first > manifest.bucket_bytes


@given(manifests)
def test_a_manifest_survives_the_wire(manifest: Manifest) -> None:
    message = policy_pb2.WeightManifest.FromString(manifest_to_wire(manifest).SerializeToString())
    assert manifest_from_wire(message) == manifest


def test_a_rendezvous_survives_the_wire() -> None:
    rendezvous = Rendezvous(3, "10.0.0.1", 4000, 1, 3, 2.5)
    assert rendezvous_from_wire(rendezvous_to_wire(rendezvous)) == rendezvous


def test_the_digest_is_the_blake3_of_all_bytes() -> None:
    assert digest_of([memoryview(b"ab"), memoryview(b""), memoryview(b"c")]) == blake3(b"abc").hexdigest()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy_version": -1}, "policy_version"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"digest": "x"}, "digest"),
        ({"tensors": ()}, "tensors"),
        ({"tensors": (TensorSpec("a", "float32", ()), TensorSpec("a", "float32", ()))}, "a"),
        ({"tensors": (TensorSpec("a", "float8", ()),)}, "a"),
        ({"tensors": (TensorSpec("a", "int32", (-1,)),)}, "a"),
    ],
)
def test_a_manifest_that_cannot_be_packed_is_refused(changes: dict[str, object], field: str) -> None:
    fields = {"policy_version": 0, "tensors": (TensorSpec("t", "bool", (1,)),), "bucket_bytes": 64, "digest": DIGEST}
    with pytest.raises(InvalidArgumentError) as refused:
        Manifest(**(fields | changes))  # type: ignore[arg-type]
    assert [violation.field for violation in refused.value.violations] == [field]


def test_an_unknown_data_type_on_the_wire_is_refused() -> None:
    message = policy_pb2.WeightManifest(tensors=[policy_pb2.TensorSpec(name="w")], bucket_bytes=1, digest=DIGEST)
    with pytest.raises(InvalidArgumentError, match="w: data_type 0"):
        manifest_from_wire(message)


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        ((TensorSpec("a", "float32", (2,)),), ["b"]),
        ((TensorSpec("a", "float32", (2,)), TensorSpec("b", "int64", ()), TensorSpec("c", "int64", ())), ["c"]),
        ((TensorSpec("a", "float32", (3,)), TensorSpec("b", "int64", ())), ["a"]),
        ((TensorSpec("a", "bfloat16", (2,)), TensorSpec("b", "int64", (1,))), ["a", "b"]),
    ],
)
def test_a_manifest_of_another_model_is_refused_by_name(sent: tuple[TensorSpec, ...], names: list[str]) -> None:
    expected = (TensorSpec("b", "int64", ()), TensorSpec("a", "float32", (2,)))
    with pytest.raises(InvalidArgumentError, match=f"fit the model: {names[0]}") as refused:
        refuse_misfit(Manifest(0, sent, 64, DIGEST), expected)
    assert [violation.field for violation in refused.value.violations] == names


def test_the_order_of_the_expected_tensors_does_not_matter() -> None:
    tensors = (TensorSpec("b", "int64", ()), TensorSpec("a", "float32", (2,)))
    refuse_misfit(Manifest(0, tensors, 64, DIGEST), tensors[::-1])


@pytest.mark.parametrize(
    "changes", [{"epoch": 0}, {"host": ""}, {"port": 0}, {"timeout_seconds": 0}, {"rank": 2}, {"rank": -1}]
)
def test_an_invalid_rendezvous_is_refused(changes: dict[str, object]) -> None:
    fields = {"epoch": 1, "host": "h", "port": 1, "rank": 1, "world_size": 2, "timeout_seconds": 1.0}
    with pytest.raises(InvalidArgumentError, match="rendezvous"):
        Rendezvous(**(fields | changes))  # type: ignore[arg-type]
