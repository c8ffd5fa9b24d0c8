"""Micro-batches: padding, sharing of contexts, and what each trained token is predicted from."""

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.micro_batch import MIN_PASS_TOKENS, MicroBatch, share_out, split_batch

# Two sequences: prompt 5 6, completion 7 8; prompt 9, completion 10. The first ends with a token that is not trained.
BATCH = TrainBatch.pack(
    [
        TrainSequence([5, 6, 7, 8, 3], [False, False, True, True, False], [0, 0, -0.7, -0.8, 0], 1.0),
        TrainSequence([9, 10], [False, True], [0, -0.1], -1.0),
    ]
)


def group(context: Sequence[int], *completions: Sequence[int]) -> TrainBatch:
    """Samples of one task, whose completions are trained whole."""
    return TrainBatch.pack(
        [
            TrainSequence(
                [*context, *own], [False] * len(context) + [True] * len(own), [0.0] * len([*context, *own]), 1
            )
            for own in completions
        ]
    )


def test_rows_are_padded_on_the_right_and_point_at_the_token_before_each_trained_one() -> None:
    (micro,) = split_batch(BATCH, max_tokens=100)
    assert micro.input_ids_BT.tolist() == [[9, 0, 0], [5, 6, 7]]  # nothing after the last trained token is fed
    assert micro.positions_P.tolist() == [0, 4, 5]
    assert BATCH.token_ids_N[micro.tokens_P].tolist() == [10, 7, 8]
    assert not micro.is_shared


def test_samples_of_one_task_share_their_context() -> None:
    (micro,) = split_batch(group([5, 6], [7, 8, 1], [9, 1], [1]), max_tokens=100)
    assert micro.input_ids_BT.tolist() == [[5, 6, 7, 8, 9]]
    assert micro.position_ids_BT.tolist() == [[0, 1, 2, 3, 2]]
    assert micro.segments_BT.tolist() == [[0, 0, 1, 1, 2]]
    assert micro.positions_P.tolist() == [1, 2, 3, 1, 4, 1]


def test_samples_of_the_same_inputs_are_fed_once() -> None:
    (micro,) = split_batch(group([5, 6], [7, 8, 1], [9, 1], [7, 8, 4]), max_tokens=100)
    assert micro.input_ids_BT.tolist() == [[5, 6, 7, 8, 9]]
    assert micro.segments_BT.tolist() == [[0, 0, 1, 1, 2]]
    assert micro.positions_P.tolist() == [1, 2, 3, 1, 4, 1, 2, 3]
    (same,) = split_batch(group([5, 6], *[[7, 8, 1]] * 4), max_tokens=100, shared_row_tokens=4)
    assert same.input_ids_BT.tolist() == [[5, 6, 7, 8]]
    assert not same.is_shared


def test_a_shared_row_ends_at_its_limit_and_nothing_is_shared_at_limit_zero() -> None:
    batch = group([5, 6], *[[7, own, 1] for own in range(5)])
    assert [micro.input_ids_BT.shape for micro in split_batch(batch, 100, shared_row_tokens=6)] == [(3, 6)]
    (alone,) = split_batch(batch, 100, shared_row_tokens=0)
    assert alone.input_ids_BT.shape == (5, 4)
    assert not alone.is_shared


def test_a_sequence_longer_than_the_limit_has_a_micro_batch_of_its_own() -> None:
    assert [micro.input_ids_BT.shape for micro in split_batch(BATCH, max_tokens=1)] == [(1, 1), (1, 3)]


def test_rows_of_different_lengths_have_little_padding_once_passes_are_large_enough() -> None:
    lengths = range(64, 4096, 64)
    batch = TrainBatch.pack(
        TrainSequence([5, *[length] * length], [False] + [True] * length, [0] * (length + 1), 1.0) for length in lengths
    )
    micros = split_batch(batch, max_tokens=100_000)
    assert sum(micro.input_ids_BT.size for micro in micros) < 1.15 * sum(lengths)
    assert min(micro.input_ids_BT.size for micro in micros) >= MIN_PASS_TOKENS


def test_an_empty_batch_has_no_micro_batches() -> None:
    assert split_batch(TrainBatch.pack([]), max_tokens=10) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(1, 60), shared_row_tokens=st.integers(0, 60))
def test_every_trained_token_is_predicted_once_from_its_own_context(
    build_batch: Callable[..., TrainBatch], seed: int, max_tokens: int, shared_row_tokens: int
) -> None:
    batch = build_batch(seed)
    predicted: list[int] = []
    for micro in split_batch(batch, max_tokens, shared_row_tokens):
        rows, width = micro.input_ids_BT.shape
        assert rows * width <= max_tokens or (rows == 1 and not micro.is_shared)
        for position, token in zip(micro.positions_P, micro.tokens_P, strict=True):
            start = token - 1 - int(micro.position_ids_BT.flat[position])
            assert batch.sequence_of_tokens[token] == batch.sequence_of_tokens[start]
            assert seen_tokens(micro, int(position)) == batch.token_ids_N[start:token].tolist()
        predicted.extend(micro.tokens_P.tolist())
    assert sorted(predicted) == np.flatnonzero(batch.loss_mask_N).tolist()


@given(tokens=st.lists(st.integers(1, 500), max_size=40), ranks=st.integers(1, 9))
def test_rows_are_shared_out_evenly(tokens: list[int], ranks: int) -> None:
    shares = share_out(tokens, ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    totals = [sum(tokens[row] for row in share) for share in shares]
    assert len(totals) == ranks
    assert max(totals) - min(totals) <= max(tokens, default=0)
    assert shares == share_out(tokens, ranks)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    sequences=st.integers(0, 12),
    max_tokens=st.integers(1, 60),
    shared_row_tokens=st.integers(0, 60),
    ranks=st.integers(1, 6),
)
def test_each_token_is_predicted_on_one_rank_and_all_ranks_do_the_same_number_of_passes(
    build_batch: Callable[..., TrainBatch],
    seed: int,
    sequences: int,
    max_tokens: int,
    shared_row_tokens: int,
    ranks: int,
) -> None:
    batch = build_batch(seed, sequences)
    by_rank = [split_batch(batch, max_tokens, shared_row_tokens, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert len({len(micros) for micros in by_rank}) == 1
    predicted = [token for micros in by_rank for micro in micros for token in micro.tokens_P.tolist()]
    assert sorted(predicted) == np.flatnonzero(batch.loss_mask_N).tolist()
    passes = list(zip(*by_rank, strict=True))
    assert all(any(len(micro.tokens_P) for micro in micros) for micros in passes)  # none is for nothing


def test_samples_of_one_task_are_work_for_all_ranks() -> None:
    batch = group([5, 6], *[[7, 8, own, 1] for own in range(4)])
    by_rank = [split_batch(batch, 100, rank=rank, ranks=2) for rank in range(2)]
    assert [[micro.input_ids_BT.shape for micro in micros] for micros in by_rank] == [[(2, 5)], [(2, 5)]]


def seen_tokens(micro: MicroBatch, position: int) -> list[int]:
    """The tokens that the flat input position may look at, in order."""
    row, column = divmod(position, micro.input_ids_BT.shape[1])
    segments_T = micro.segments_BT[row, : column + 1]
    is_seen_T = (segments_T == 0) | (segments_T == segments_T[-1])
    seen: list[int] = micro.input_ids_BT[row, : column + 1][is_seen_T].tolist()
    return seen
