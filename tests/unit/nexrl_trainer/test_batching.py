"""Batches: packing and weights."""

from dataclasses import replace

import numpy as np
import pytest

from nexrl.errors import InvalidArgumentError
from nexrl_trainer.batching import Aggregation, TrainBatch, TrainSequence, token_weights

# Two sequences: prompt 5 6, completion 7 8; prompt 9, completion 10. The first ends with a token that is not trained.
BATCH = TrainBatch.pack(
    [
        TrainSequence([5, 6, 7, 8, 3], [False, False, True, True, False], [0, 0, -0.7, -0.8, 0], 1.0),
        TrainSequence([9, 10], [False, True], [0, -0.1], -1.0),
    ]
)


@pytest.mark.guide("B5")
def test_sequences_lie_end_to_end_in_the_order_given() -> None:
    assert BATCH.token_ids_N.tolist() == [5, 6, 7, 8, 3, 9, 10]
    assert BATCH.advantages_N.tolist() == [1, 1, 1, 1, 1, -1, -1]
    assert BATCH.lengths_B.tolist() == [5, 2]
    assert BATCH.token_count == 3


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


def test_an_empty_batch_has_no_weights() -> None:
    empty = TrainBatch.pack([])
    assert token_weights(empty, "token").size == token_weights(empty, "sequence").size == 0


@pytest.mark.guide("B4")
def test_lengths_that_do_not_match_the_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="lengths_B"):
        replace(BATCH, lengths_B=np.array([5]))


@pytest.mark.guide("B3")
def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"advantages_N: has shape \(1,\); must have one entry per token, 7"):
        replace(BATCH, advantages_N=np.ones(1, np.float32))


def test_a_first_token_cannot_be_trained() -> None:
    with pytest.raises(InvalidArgumentError, match="first token"):
        TrainBatch.pack([TrainSequence([5, 6], [True, True], [0, 0], 1.0)])
