"""Tensors to packed buckets and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError
from nexrl.weights.gather import gathered_snapshot
from nexrl.weights.packing import Snapshot, digest, snapshot, tensor_specs, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool]


@st.composite
def named_tensors(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = []
    for index in range(draw(st.integers(1, 8))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        tensor = torch.randint(-100, 100, shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
        tensors.append((f"t{index}", tensor.transpose(0, -1) if draw(st.booleans()) and shape else tensor))
    return tensors


@given(named_tensors(), st.integers(1, 2000))
def test_packing_and_unpacking_give_the_same_tensors(
    tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int
) -> None:
    packed = snapshot(iter(tensors), policy_version=3, bucket_bytes=bucket_bytes)
    found = unpack(packed.manifest, packed.buffers)
    assert list(found) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@given(named_tensors(), st.integers(1, 2000), st.integers(1, 2000))
def test_the_digest_does_not_depend_on_the_buckets(
    tensors: list[tuple[str, torch.Tensor]], one: int, other: int
) -> None:
    digests = [snapshot(tensors, policy_version=0, bucket_bytes=size).manifest.digest for size in (one, other)]
    assert digests[0] == digests[1]


def test_the_digest_notices_one_bit() -> None:
    packed = snapshot([("w", torch.zeros(100))], policy_version=0, bucket_bytes=64)
    packed.buffers[0][17] ^= 1
    assert digest(packed.manifest, packed.buffers) != packed.manifest.digest


def test_a_gathered_version_is_packed_into_the_memory_of_the_previous_one() -> None:
    def gathered(value: float, replaced: Snapshot | None = None) -> Snapshot:
        packed = gathered_snapshot(
            [("w", torch.full((100,), value)), ("v", torch.ones(3))],
            policy_version=int(value),
            bucket_bytes=64,
            is_sender=True,
            replaced=replaced,
        )
        assert packed is not None
        return packed

    first = gathered(1.0)
    places = [buffer.data_ptr() for buffer in first.buffers]
    second = gathered(2.0, first)
    assert [buffer.data_ptr() for buffer in second.buffers] == places
    assert torch.equal(unpack(second.manifest, second.buffers)["w"], torch.full((100,), 2.0))
    assert digest(second.manifest, second.buffers) == second.manifest.digest != gathered(1.0).manifest.digest


def test_a_snapshot_does_not_follow_the_weights() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    packed = snapshot([("w", weights)], policy_version=0, bucket_bytes=64)
    with torch.no_grad():
        weights.zero_()
    assert torch.equal(unpack(packed.manifest, packed.buffers)["w"], torch.ones(3))


@given(named_tensors(), named_tensors(), st.integers(1, 2000))
def test_memory_that_is_used_again_holds_what_new_memory_would(
    before: list[tuple[str, torch.Tensor]], tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int
) -> None:
    replaced = snapshot(before, policy_version=0, bucket_bytes=bucket_bytes)
    again = snapshot(before, policy_version=1, bucket_bytes=bucket_bytes, replaced=replaced)
    assert all(one is other for one, other in zip(again.buffers, replaced.buffers, strict=True))
    packed = snapshot(tensors, policy_version=2, bucket_bytes=bucket_bytes, replaced=replaced)  # of another model
    assert packed.manifest.digest == snapshot(tensors, policy_version=2, bucket_bytes=bucket_bytes).manifest.digest
    assert digest(packed.manifest, packed.buffers) == packed.manifest.digest


def test_types_that_have_no_place_on_the_wire_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="w: data type complex64"):
        tensor_specs([("w", torch.zeros(1, dtype=torch.complex64))])
