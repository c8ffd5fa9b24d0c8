"""Micro-batches: the padded rows of one forward pass. Pure NumPy. The result of a step must not depend on the split.

Samples of one task begin with the same context, which is fed once. A shared row is the context, then one continuation
after another; each continuation sees the context and itself. Samples of equal inputs share their columns, because a
policy that has learned often repeats itself. Suffixes: _B rows, _T columns, _P predicted tokens, flat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nexrl.train_batch import TrainBatch

SHARED_ROW_TOKENS = 512
"""Longest shared row. Attention costs the square of its length, and a long continuation saves little by sharing."""

MIN_PASS_TOKENS, MAX_PADDING = 1024, 1 / 8
"""A micro-batch of so many tokens ends before a row that would make more than this share of it padding. Smaller ones
would use the hardware worse than padding does."""


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass. All int64, padded with 0 on the right, where causal attention never looks.

    `segments_BT` is 0 for the context and 1, 2, … for the continuations of a shared row; a row of one sequence is all
    0. A column sees the columns up to itself of segment 0 and of its own segment. `position_ids_BT` counts from each
    sequence's start. Token `tokens_P[i]` of the batch (an index into _N) is predicted at the flat input position
    `positions_P[i]`.
    """

    input_ids_BT: NDArray[np.int64]
    position_ids_BT: NDArray[np.int64]
    segments_BT: NDArray[np.int64]
    positions_P: NDArray[np.int64]
    tokens_P: NDArray[np.int64]

    @property
    def is_shared(self) -> bool:
        """True if a row has several sequences, so that plain causal attention would see too much."""
        return bool(self.segments_BT.any())


EMPTY = MicroBatch(*np.zeros((3, 1, 1), np.int64), *np.zeros((2, 0), np.int64))
"""One column of padding, and no predicted token: a forward pass that keeps up with other ranks."""


@dataclass(frozen=True)
class _Sequence:
    """Tokens of the batch before the sequence (`start`); of the sequence before its first trained token (`context`) and
    before its last one (`inputs`). `own_ids` are the bytes of those between.
    """

    start: int
    context: int
    inputs: int
    own_ids: bytes


@dataclass
class _Row:
    """Sequences of one context, in `length` columns. `places`: first column of each continuation."""

    length: int
    sequences: list[_Sequence] = field(default_factory=list)
    places: dict[bytes, int] = field(default_factory=dict)

    def length_with(self, sequence: _Sequence) -> int:
        return self.length + (0 if sequence.own_ids in self.places else sequence.inputs - sequence.context)

    def add(self, sequence: _Sequence) -> None:
        self.places.setdefault(sequence.own_ids, self.length)
        self.length = max(self.length, self.places[sequence.own_ids] + sequence.inputs - sequence.context)
        self.sequences.append(sequence)


def split_batch(
    batch: TrainBatch, max_tokens: int, shared_row_tokens: int = SHARED_ROW_TOKENS, *, rank: int = 0, ranks: int = 1
) -> list[MicroBatch]:
    """Return micro-batches of at most `max_tokens` padded input tokens, shortest rows first, otherwise in batch order.

    A sequence longer than the limit gets a micro-batch of its own. A sequence with nothing to train is left out. Rows
    of several sequences have at most `shared_row_tokens` and at most `max_tokens`; 0 shares none.

    Of several `ranks`, each has a share of the rows, and the result is that of `rank`. All ranks have the same number
    of micro-batches: ranks that need fewer have EMPTY ones at the end.
    """
    rows = _rows(batch, min(shared_row_tokens, max_tokens))
    if ranks > 1:  # a row is on one rank, so no row may have more than a rank's share of the tokens
        rows = _rows(batch, min(shared_row_tokens, max_tokens, sum(row.length for row in rows) // ranks))
    shares = share_out([row.length for row in rows], ranks)
    parts = [list(_cut(sorted((rows[i] for i in share), key=lambda row: row.length), max_tokens)) for share in shares]
    own = [_micro_batch(batch, part) for part in parts[rank]]
    return own + [EMPTY] * (max(map(len, parts)) - len(own))


def share_out(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the rows of each rank in ascending order, given the tokens of each row.

    The longest row comes first, and each row goes to the rank that has the fewest tokens. Two ranks therefore differ by
    at most the longest row. Depends on the arguments only, so all ranks find the same.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for row in sorted(range(len(tokens)), key=lambda row: -tokens[row]):
        rank = totals.index(min(totals))
        shares[rank].append(row)
        totals[rank] += tokens[row]
    return [sorted(share) for share in shares]


def _sequences(batch: TrainBatch) -> list[_Sequence]:
    trained = np.flatnonzero(batch.loss_mask_N)
    starts = np.cumsum(batch.lengths_B) - batch.lengths_B
    owners = np.searchsorted(starts, trained, side="right") - 1
    owners, first, counts = np.unique(owners, return_index=True, return_counts=True)
    starts, last = starts[owners], first + counts - 1
    # Nothing after the last trained token is predicted, so nothing after the one before it is fed.
    own_ids = (
        batch.token_ids_N[i:j].tobytes() for i, j in zip(trained[first].tolist(), trained[last].tolist(), strict=True)
    )
    contexts, inputs = trained[first] - starts, trained[last] - starts
    return list(map(_Sequence, starts.tolist(), contexts.tolist(), inputs.tolist(), own_ids))


def _rows(batch: TrainBatch, shared_row_tokens: int) -> list[_Row]:
    rows: list[_Row] = []
    open_rows: dict[bytes, _Row] = {}
    for sequence in _sequences(batch):
        context = batch.token_ids_N[sequence.start : sequence.start + sequence.context].tobytes()
        row = open_rows.get(context)
        if row is None or row.length_with(sequence) > shared_row_tokens:
            open_rows[context] = row = _Row(sequence.context)
            rows.append(row)
        row.add(sequence)
    return rows


def _cut(rows: Sequence[_Row], max_tokens: int) -> Iterator[Sequence[_Row]]:
    first = fed = 0
    for end, row in enumerate(rows):
        # Ascending lengths: this row is as long as the padded micro-batch would be with it.
        padded = (end - first + 1) * row.length
        is_wasteful = fed >= MIN_PASS_TOKENS and padded - fed - row.length > MAX_PADDING * padded
        if end > first and (padded > max_tokens or is_wasteful):
            yield rows[first:end]
            first, fed = end, 0
        fed += row.length
    if first < len(rows):
        yield rows[first:]


def _micro_batch(batch: TrainBatch, rows: Sequence[_Row]) -> MicroBatch:
    width = rows[-1].length
    input_ids_BT, position_ids_BT, segments_BT = (np.zeros((len(rows), width), np.int64) for _ in range(3))
    row_R = np.arange(len(rows)) * width
    start_R, context_R = np.array([(row.sequences[0].start, row.sequences[0].context) for row in rows]).T
    owner, offset = _ranges(context_R)
    columns = row_R[owner] + offset
    input_ids_BT.ravel()[columns] = batch.token_ids_N[start_R[owner] + offset]
    position_ids_BT.ravel()[columns] = offset
    first_S, segment_S, start_S, context_S, inputs_S = np.array(list(_continuations(rows, width))).T
    owner, offset = _ranges(inputs_S - context_S)
    columns = first_S[owner] + offset
    input_ids_BT.ravel()[columns] = batch.token_ids_N[start_S[owner] + context_S[owner] + offset]
    position_ids_BT.ravel()[columns] = context_S[owner] + offset
    segments_BT.ravel()[columns] = segment_S[owner]
    owner, offset = _ranges(inputs_S - context_S + 1)
    tokens = start_S[owner] + context_S[owner] + offset
    # The first token is predicted by the context's last column, the others by the column before their own.
    last_of_context_S = np.arange(len(rows)).repeat([len(row.sequences) for row in rows]) * width + context_S - 1
    positions = np.where(offset == 0, last_of_context_S[owner], first_S[owner] + offset - 1)
    is_trained = batch.loss_mask_N[tokens]
    return MicroBatch(input_ids_BT, position_ids_BT, segments_BT, positions[is_trained], tokens[is_trained])


def _continuations(rows: Sequence[_Row], width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield flat first column, segment, start, context and inputs of each sequence."""
    for number, row in enumerate(rows):
        segments = {own_ids: segment for segment, own_ids in enumerate(row.places, start=int(len(row.places) > 1))}
        for sequence in row.sequences:
            column = number * width + row.places[sequence.own_ids]
            yield column, segments[sequence.own_ids], sequence.start, sequence.context, sequence.inputs


def _ranges(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return owner and offset of each element of ranges of `lengths`: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    owner = np.arange(len(lengths)).repeat(lengths)
    return owner, np.arange(len(owner)) - (np.cumsum(lengths) - lengths)[owner]
