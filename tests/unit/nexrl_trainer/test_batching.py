"""Batches: packing, weights, and the split into micro-batches."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError
from nexrl_trainer.batching import Aggregation, TrainBatch, TrainSequence, split_batch, token_weights

# Two sequences: prompt 5 6, completion 7 8; prompt 9, completion 10. The first ends with a token that is not trained.
BATCH = TrainBatch.pack(
    [
        TrainSequence([5, 6, 7, 8, 3], [False, False, True, True, False], [0, 0, -0.7, -0.8, 0], 1.0),
        TrainSequence([9, 10], [False, True], [0, -0.1], -1.0),
    ]
)


def test_sequences_lie_end_to_end_in_the_order_given() -> None:
    assert BATCH.token_ids_N.tolist() == [5, 6, 7, 8, 3, 9, 10]
    assert BATCH.advantages_N.tolist() == [1, 1, 1, 1, 1, -1, -1]
    assert BATCH.lengths_B.tolist() == [5, 2]
    assert BATCH.token_count == 3


def test_micro_batch_pads_on_the_right_and_points_at_the_token_before_each_trained_one() -> None:
    (micro,) = split_batch(BATCH, max_tokens=100)
    assert micro.input_ids_BT.tolist() == [[9, 0, 0], [5, 6, 7]]  # nothing after the last trained token is fed
    assert micro.positions_P.tolist() == [0, 4, 5]
    assert BATCH.token_ids_N[micro.tokens_P].tolist() == [10, 7, 8]


def test_a_sequence_longer_than_the_limit_has_a_micro_batch_of_its_own() -> None:
    assert [micro.input_ids_BT.shape for micro in split_batch(BATCH, max_tokens=1)] == [(1, 1), (1, 3)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(1, 60))
def test_every_trained_token_is_predicted_once_from_its_own_context(
    build_batch: Callable[..., TrainBatch], seed: int, max_tokens: int
) -> None:
    batch = build_batch(seed)
    predicted: list[int] = []
    for micro in split_batch(batch, max_tokens):
        rows, width = micro.input_ids_BT.shape
        assert rows * width <= max_tokens or rows == 1
        for position, token in zip(micro.positions_P, micro.tokens_P, strict=True):
            row, column = divmod(int(position), width)
            context = batch.token_ids_N[token - column - 1 : token]
            assert batch.sequence_of_tokens[token] == batch.sequence_of_tokens[token - column - 1]
            assert micro.input_ids_BT[row, : column + 1].tolist() == context.tolist()
        predicted.extend(micro.tokens_P.tolist())
    assert sorted(predicted) == np.flatnonzero(batch.loss_mask_N).tolist()


def test_token_weights_are_equal_and_sequence_weights_favour_short_sequences() -> None:
    assert token_weights(BATCH, "token")[BATCH.loss_mask_N].tolist() == pytest.approx([1 / 3] * 3)
    assert token_weights(BATCH, "sequence")[BATCH.loss_mask_N].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_weights_of_the_parts_of_a_step_are_those_of_the_step(aggregation: Aggregation) -> None:
    whole_N = token_weights(BATCH, aggregation)
    denominator = {"token": 3, "sequence": 2}[aggregation]
    parts = [BATCH.select(np.array(rows)) for rows in ([True, False], [False, True])]
    parts_N = [token_weights(part, aggregation, denominator) for part in parts]
    np.testing.assert_array_equal(np.concatenate(parts_N), whole_N)


def test_a_sequence_that_is_not_selected_leaves_the_denominator() -> None:
    kept = BATCH.select(np.array([False, True]))
    assert token_weights(kept, "token").tolist() == [0, 1]


def test_empty_batch_has_no_micro_batches() -> None:
    empty = TrainBatch.pack([])
    assert split_batch(empty, max_tokens=10) == []
    assert token_weights(empty, "token").size == token_weights(empty, "sequence").size == 0


def test_lengths_that_do_not_match_the_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="lengths_B"):
        replace(BATCH, lengths_B=np.array([5]))


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"advantages_N: has shape \(1,\); must have one entry per token, 7"):
        replace(BATCH, advantages_N=np.ones(1, np.float32))


def test_a_first_token_cannot_be_trained() -> None:
    with pytest.raises(InvalidArgumentError, match="first token"):
        TrainBatch.pack([TrainSequence([5, 6], [True, True], [0, 0], 1.0)])
