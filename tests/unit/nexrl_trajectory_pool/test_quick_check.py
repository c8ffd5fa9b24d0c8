"""The quick check calls nothing good that the slow one, which reads each token, would refuse."""

import math
import struct

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import example, given
from hypothesis import strategies as st

from nexrl.v1 import packed_pb2 as packed_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1 import validator_service_pb2 as validator_pb
from nexrl_trajectory_pool.quick_check import are_good
from nexrl_trajectory_pool.results import _token_violations
from nexrl_trajectory_pool.sampling import SamplingParameters
from tests.support.pool import trajectory

VOCABULARIES = (None, 1, 127, 128, 129, 300, 16_384, 16_400, 151_936, 2**31 - 1)
BOUNDARIES = sorted({value + by for value in VOCABULARIES if value for by in (-2, -1, 0, 1)} | {0, 2**21, 2**28})
MIRRORS = [
    (packed_pb.PackedPutSamplesRequest, pool_pb.PutSamplesRequest),
    (packed_pb.PackedPutSamplesRequest, validator_pb.PutValidationSamplesRequest),
    (pool_pb.PutSamplesResponse, validator_pb.PutValidationSamplesResponse),
    (packed_pb.PackedSampleResult, pb.SampleResult),
    (packed_pb.PackedTrajectory, pb.Trajectory),
    (packed_pb.PackedLeaseBatchResponse, pool_pb.LeaseBatchResponse),
    (packed_pb.PackedBatchLease, pool_pb.BatchLease),
    (packed_pb.PackedGroup, pb.Group),
]

token_ids = st.sampled_from([token for token in BOUNDARIES if 0 <= token < 2**31]) | st.integers(-2, 2**31 - 1)
rewards = st.sampled_from([0.0, 1.5, math.inf, math.nan])
logprobs = st.sampled_from([0.0, -1.5, 5e-4, 0.1, -103.0, -200.0, math.inf, -math.inf, math.nan])
draws = st.none() | st.builds(
    pb.Draw,
    temperature=st.sampled_from([1.0, 0.7]),
    top_p=st.sampled_from([0.0, 1.0, 0.9]),
    top_k=st.sampled_from([0, 2]),
)


@st.composite
def trajectories(draw: st.DrawFn) -> pb.Trajectory:
    """Mostly good ones, and every kind of fault."""
    tokens = draw(st.lists(token_ids, min_size=0, max_size=6))
    near = st.integers(max(0, len(tokens) - 1), len(tokens) + 1)
    masks = st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))
    drawn = pb.Trajectory(
        token_ids=tokens,
        loss_mask=draw(masks | near.map(lambda length: [False] + [True] * (length - 1))),
        logprobs=draw(near.flatmap(lambda length: st.lists(logprobs, min_size=length, max_size=length))),
        reward=draw(rewards),
        reward_components={"exact": draw(rewards)},
    )
    bounds = st.integers(-1, len(tokens) + 1)
    for start, end, version in draw(st.lists(st.tuples(bounds, bounds, st.integers(-1, 3)), max_size=3)):
        drawn.spans.add(start=start, end=end, policy_version=version)
    for start, end, how in draw(st.lists(st.tuples(bounds, bounds, draws), max_size=2)):
        drawn.completions.add(start=start, end=end, draw=how)
    return drawn


@given(
    drawn=st.lists(trajectories(), min_size=1, max_size=3),
    vocabulary_size=st.sampled_from(VOCABULARIES),
    sampling=st.none() | st.just(SamplingParameters()),
)
def test_nothing_bad_is_called_good(
    drawn: list[pb.Trajectory], vocabulary_size: int | None, sampling: SamplingParameters | None
) -> None:
    if is_good([one.SerializeToString() for one in drawn], vocabulary_size, sampling):
        assert not list(_token_violations([pb.SampleResult(trajectories=drawn)], vocabulary_size, sampling))


def test_only_a_draw_with_other_parameters_is_left_to_the_slow_way() -> None:
    as_asked, otherwise = trajectory(), trajectory()
    otherwise.completions[0].draw.temperature = 0.7
    silent = trajectory()
    del silent.completions[:]
    sampling = SamplingParameters()
    assert is_good([as_asked.SerializeToString()], None, sampling)
    assert not is_good([otherwise.SerializeToString()], None, sampling)
    assert is_good([silent.SerializeToString()], None, sampling)


@given(
    tokens=st.lists(token_ids.filter(lambda token: token >= 0), min_size=2), vocabulary=st.sampled_from(VOCABULARIES)
)
@example(tokens=[127, 128], vocabulary=128)
def test_good_is_what_has_no_fault(tokens: list[int], vocabulary: int | None) -> None:
    found = pb.Trajectory(
        token_ids=tokens,
        loss_mask=[False] + [True] * (len(tokens) - 1),
        logprobs=[0.0] * len(tokens),
        spans=[pb.PolicySpan(start=1, end=len(tokens))],
    )
    expected = vocabulary is None or max(tokens) < vocabulary
    assert is_good([found.SerializeToString()], vocabulary) == expected
    assert is_good([trajectory().SerializeToString(), found.SerializeToString()], vocabulary) == (
        expected and (vocabulary is None or vocabulary > 6)
    )


ODD = {
    "one token more, alone": b"\x08\x05",
    "one token more, negative": b"\x08" + b"\xff" * 9 + b"\x01",
    "two tokens more": b"\x0a\x02\x05\x05",
    "a flag more": b"\x10\x01",
    "a log-probability more": b"\x1d" + struct.pack("<f", 0.0),
}


@pytest.mark.parametrize("name", ODD)
def test_lists_in_several_pieces_are_left_to_the_slow_way(name: str) -> None:
    good = trajectory().SerializeToString()
    assert is_good([good], None)
    assert not is_good([ODD[name] + good], None)
    assert not is_good([good + ODD[name]], None)


def test_numbers_with_more_bytes_than_they_need_are_left_to_the_slow_way() -> None:
    good = trajectory()
    tokens = packed_pb.PackedTrajectory.FromString(good.SerializeToString())
    tokens.token_ids[0] = b"\x84\x80\x80\x80\x00" + tokens.token_ids[0][1:]
    assert pb.Trajectory.FromString(tokens.SerializeToString()) == good
    assert not is_good([tokens.SerializeToString()], 12)
    flags = packed_pb.PackedTrajectory.FromString(good.SerializeToString())
    flags.loss_mask[0] = b"\x00\x80\x00\x01\x01"
    assert pb.Trajectory.FromString(flags.SerializeToString()) == good
    assert not is_good([flags.SerializeToString()], 12)


@pytest.mark.parametrize(("mirror", "mirrored"), MIRRORS, ids=lambda kind: str(kind.DESCRIPTOR.name))
def test_the_mirror_has_the_same_form_on_the_wire(mirror: type, mirrored: type) -> None:
    ours: Descriptor = mirror.DESCRIPTOR  # type: ignore[attr-defined]
    theirs: Descriptor = mirrored.DESCRIPTOR  # type: ignore[attr-defined]
    assert {form(field) for field in ours.fields} == {form(field) for field in theirs.fields}


def form(field: FieldDescriptor) -> tuple[int, str, bool, str]:
    """Number, name, whether there may be several, and type: one word for all that is bytes on the wire."""
    is_bytes = field.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE) or field.GetOptions().packed
    return field.number, field.name, bool(field.is_repeated), "bytes" if is_bytes else str(field.type)


def is_good(serialized: list[bytes], vocabulary_size: int | None, sampling: SamplingParameters | None = None) -> bool:
    trajectories = [packed_pb.PackedTrajectory.FromString(one) for one in serialized]
    return are_good(trajectories, vocabulary_size, sampling)
