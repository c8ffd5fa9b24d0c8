"""A quick look at results, for most are good: no token is touched in Python.

What it finds good, `results.py` would find no fault with. Of the rest it says nothing, not even that anything is wrong.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from nexrl.v1 import packed_pb2 as pb
from nexrl.v1.trajectory_pb2 import PolicySpan

LISTS = {pb.PackedTrajectory.DESCRIPTOR.fields_by_name[name].number for name in ("token_ids", "loss_mask", "logprobs")}


def are_good(trajectories: Sequence[pb.PackedTrajectory], vocabulary_size: int | None) -> bool:
    """True when these are well-formed, and every token id is below `vocabulary_size`."""
    token_ids, lengths, logprobs = [], [], []
    for trajectory in trajectories:
        if not _is_in_one_piece(trajectory):
            return False
        loss_mask = trajectory.loss_mask[0]
        if not _is_good(trajectory, loss_mask):
            return False
        token_ids.append(trajectory.token_ids[0])
        lengths.append(len(loss_mask))
        logprobs.append(trajectory.logprobs[0])
    if not trajectories:
        return True
    sizes = [4 * length for length in lengths]
    return (
        list(map(len, logprobs)) == sizes and _are_finite(logprobs) and _are_tokens(token_ids, lengths, vocabulary_size)
    )


def _is_in_one_piece(trajectory: pb.PackedTrajectory) -> bool:
    """Whether its lists came as nearly everyone sends them: whole."""
    if not len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.logprobs) == 1:
        return False
    unknown = UnknownFieldSet(trajectory)
    return not any(unknown[i].field_number in LISTS for i in range(len(unknown)))


def _is_good(trajectory: pb.PackedTrajectory, loss_mask: bytes) -> bool:
    trained = loss_mask.count(1)
    return (
        loss_mask.startswith(b"\0")
        and trained + loss_mask.count(0) == len(loss_mask)
        and math.isfinite(trajectory.reward)
        and all(map(math.isfinite, trajectory.reward_components.values()))
        and _cover(trajectory.spans, loss_mask, trained)
    )


def _cover(spans: Iterable[PolicySpan], loss_mask: bytes, trained: int) -> bool:
    covered, end = 0, 0
    for span in spans:
        if not (end <= span.start < span.end <= len(loss_mask) and span.policy_version >= 0):
            return False
        covered += loss_mask.count(1, span.start, span.end)
        end = span.end
    return end > 0 and covered == trained


def _are_finite(logprobs: Sequence[bytes]) -> bool:
    return bool(np.isfinite(np.frombuffer(b"".join(logprobs), "<f4")).all())


def _are_tokens(token_ids: Sequence[bytes], lengths: Sequence[int], vocabulary_size: int | None) -> bool:
    """Whether each is as many varints as its length says, of no less than 0 and below `vocabulary_size`."""
    packed = np.frombuffer(b"".join([b"\0", *token_ids]), np.uint8)  # behind a first end, from which widths are counted
    ends = np.flatnonzero(packed < 0x80)  # of each varint
    edges = np.cumsum([len(piece) for piece in token_ids])
    if (packed[edges] >= 0x80).any() or not np.array_equal(np.searchsorted(ends, edges), np.cumsum(lengths)):
        return False
    widths, ends = np.diff(ends), ends[1:]
    limit = 2**31 if vocabulary_size is None else vocabulary_size
    most = -(-limit.bit_length() // 7)
    if widths.max() > most:
        return False
    # The last byte has the highest bits: only where it is that of the limit, or above, do the others matter.
    is_open = (widths == most) & (packed[ends] >= limit >> 7 * (most - 1))
    return not is_open.any() or bool((_values(packed, ends[is_open], most) < limit).all())


def _values(packed: NDArray[np.uint8], ends: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    values = np.zeros(len(ends), np.int64)
    for back in range(width):
        values = values << 7 | packed[ends - back] & 0x7F
    return values
