"""Fast path: validates well-formed trajectories without touching a token in Python.

What it accepts, `results.py` would accept. What it does not accept may be right or wrong: `results.py` decides.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from nexrl.column_proto import column_violations
from nexrl.v1 import packed_pb2 as pb
from nexrl.v1.trajectory_pb2 import PolicySpan
from nexrl_trajectory_pool.sampling import MAX_LOGPROB, MIN_LOGPROB, SamplingParameters

LISTS = {pb.PackedTrajectory.DESCRIPTOR.fields_by_name[name].number for name in ("token_ids", "loss_mask", "logprobs")}


def are_good(
    trajectories: Sequence[pb.PackedTrajectory],
    vocabulary_size: int | None,
    sampling: SamplingParameters | None = None,
    max_tokens: int | None = None,
) -> bool:
    """Return True if these are well-formed, have at most `max_tokens`, and every token id is below `vocabulary_size`.

    With `sampling`, each must also train some token, and record no other parameters for any draw.
    """
    token_ids, lengths, logprobs = [], [], []
    draws: set[tuple[float, float, int]] = set()  # nearly always one
    for trajectory in trajectories:
        if not _is_in_one_piece(trajectory):
            return False
        loss_mask = trajectory.loss_mask[0]
        if not _is_good(trajectory, loss_mask):
            return False
        if sampling is not None:
            if 1 not in loss_mask:
                return False
            draws.update(
                (c.draw.temperature, c.draw.top_p, c.draw.top_k) for c in trajectory.completions if c.HasField("draw")
            )
        token_ids.append(trajectory.token_ids[0])
        lengths.append(len(loss_mask))
        logprobs.append(trajectory.logprobs[0])
    if not trajectories:
        return True
    sizes = [4 * length for length in lengths]
    return (
        (max_tokens is None or max(lengths) <= max_tokens)
        and (sampling is None or not any(any(sampling.differences(*draw)) for draw in draws))
        and list(map(len, logprobs)) == sizes
        and _are_logprobs(logprobs)
        and _are_tokens(token_ids, lengths, vocabulary_size)
    )


def _is_in_one_piece(trajectory: pb.PackedTrajectory) -> bool:
    """Return whether each list is in one piece. Nearly every client sends it so."""
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
        and not any(column_violations("", trajectory.columns, len(loss_mask)))
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


def _are_logprobs(logprobs: Sequence[bytes]) -> bool:
    values = np.frombuffer(b"".join(logprobs), "<f4")
    # Both comparisons are False for NaN.
    return bool(((values >= MIN_LOGPROB) & (values <= MAX_LOGPROB)).all())


def _are_tokens(token_ids: Sequence[bytes], lengths: Sequence[int], vocabulary_size: int | None) -> bool:
    """Return True if each is as many varints as its length says, all from 0 and below `vocabulary_size`."""
    packed = np.frombuffer(b"".join([b"\0", *token_ids]), np.uint8)  # after a first end, from which widths are counted
    ends = np.flatnonzero(packed < 0x80)  # of each varint
    edges = np.cumsum([len(piece) for piece in token_ids])
    if (packed[edges] >= 0x80).any() or not np.array_equal(np.searchsorted(ends, edges), np.cumsum(lengths)):
        return False
    widths, ends = np.diff(ends), ends[1:]
    limit = 2**31 if vocabulary_size is None else vocabulary_size
    most = -(-limit.bit_length() // 7)
    if widths.max() > most:
        return False
    # The last byte has the highest bits: the others matter only if it is that of the limit, or above.
    is_open = (widths == most) & (packed[ends] >= limit >> 7 * (most - 1))
    return not is_open.any() or bool((_values(packed, ends[is_open], most) < limit).all())


def _values(packed: NDArray[np.uint8], ends: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    values = np.zeros(len(ends), np.int64)
    for back in range(width):
        values = values << 7 | packed[ends - back] & 0x7F
    return values
