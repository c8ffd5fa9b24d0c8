"""Batches: packing and weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nexrl.errors import InvalidArgumentError
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.batching import token_weights

# Two sequences: prompt 5 6, completion 7 8; prompt 9, completion 10. The first ends with a token that is not trained.
SEQUENCES = [
    TrainSequence([5, 6, 7, 8, 3], [False, False, True, True, False], [0, 0, -0.7, -0.8, 0], 1.0),
    TrainSequence([9, 10], [False, True], [0, -0.1], -1.0),
]
BATCH = TrainBatch.pack(SEQUENCES)


@pytest.mark.guide("B5")
def test_sequences_lie_end_to_end_in_the_order_given() -> None:
    assert BATCH.token_ids_N.tolist() == [5, 6, 7, 8, 3, 9, 10]
    assert BATCH.advantages_N.tolist() == [1, 1, 1, 1, 1, -1, -1]
    assert BATCH.lengths_B.tolist() == [5, 2]
    assert BATCH.token_count == 3


def test_token_weights_are_equal_and_sequence_weights_favour_short_sequences() -> None:
    assert token_weights(BATCH, "token")[BATCH.loss_mask_N].tolist() == pytest.approx([1 / 3] * 3)
    assert token_weights(BATCH, "sequence")[BATCH.loss_mask_N].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])


def test_constant_weights_are_equal_whatever_the_lengths() -> None:
    weights_N = token_weights(BATCH, "constant", constant_tokens=8)
    assert weights_N[BATCH.loss_mask_N].tolist() == pytest.approx([1 / 16] * 3)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_weights_of_the_parts_of_a_step_are_those_of_the_step(aggregation: str) -> None:
    whole_N = token_weights(BATCH, aggregation, constant_tokens=8)
    denominator = {"token": 3, "sequence": 2, "constant": 2}[aggregation]
    parts = [BATCH.select(np.array(rows)) for rows in ([True, False], [False, True])]
    parts_N = [token_weights(part, aggregation, denominator, constant_tokens=8) for part in parts]
    np.testing.assert_array_equal(np.concatenate(parts_N), whole_N)


def test_a_sequence_that_is_not_selected_leaves_the_denominator() -> None:
    kept = BATCH.select(np.array([False, True]))
    assert token_weights(kept, "token").tolist() == [0, 1]


def test_an_empty_batch_has_no_weights() -> None:
    empty = TrainBatch.pack([])
    assert token_weights(empty, "token").size == token_weights(empty, "sequence").size == 0


def test_sequences_may_come_from_a_generator() -> None:
    assert TrainBatch.pack(iter(SEQUENCES)).token_count == BATCH.token_count > 0


@pytest.mark.guide("B4")
def test_lengths_that_do_not_match_the_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="lengths_B"):
        replace(BATCH, lengths_B=np.array([5]))


@pytest.mark.guide("B3")
def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"advantages_N: has shape \(1,\); must have one entry per token, 7"):
        replace(BATCH, advantages_N=np.ones(1, np.float32))


def test_advantages_and_columns_are_per_token_or_per_sequence() -> None:
    batch = TrainBatch.pack(
        [
            replace(SEQUENCES[0], advantage=np.arange(5.0), columns={"turn": [0, 0, 1, 1, 2], "level": 3}),
            replace(SEQUENCES[1], columns={"turn": [0, 1], "level": 4}),
        ]
    )
    assert batch.advantages_N.tolist() == [0, 1, 2, 3, 4, -1, -1]
    assert {name: column.tolist() for name, column in batch.columns.items()} == {
        "turn": [0, 0, 1, 1, 2, 0, 1],
        "level": [3, 4],
    }
    at_tokens = batch.columns_of(np.array([2, 6]))
    assert {name: column.tolist() for name, column in at_tokens.items()} == {"turn": [1, 1], "level": [3, 4]}
    kept = batch.select(np.array([False, True]))
    assert {name: column.tolist() for name, column in kept.columns.items()} == {"turn": [0, 1], "level": [4]}


@pytest.mark.parametrize(
    ("first", "second", "packed"),
    [
        (True, False, np.array([True, False])),
        (True, 2, np.array([1, 2])),
        (1, 0.5, np.array([1, 0.5], np.float32)),
        (True, 0.5, np.array([1, 0.5], np.float32)),
        (7, None, np.array([7, np.nan], np.float32)),
        (None, True, np.array([np.nan, 1], np.float32)),
        (7, [1, 2], np.array([7, 7, 7, 7, 7, 1, 2])),
        (None, [1, 2], np.array([np.nan] * 5 + [1, 2], np.float32)),
        ([True] * 5, 0.5, np.array([1] * 5 + [0.5] * 2, np.float32)),
    ],
)
def test_sequences_whose_columns_differ_are_packed(first: Any, second: Any, packed: NDArray[Any]) -> None:
    values = (first, second)
    columns: list[dict[str, Any]] = [{} if value is None else {"turn": value} for value in values]
    batch = TrainBatch.pack([replace(s, columns=c) for s, c in zip(SEQUENCES, columns, strict=True)])
    np.testing.assert_array_equal(batch.columns["turn"], packed, strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"columns": {"turn": [0, 1]}},
            r"sequences\[0\]\.columns\[turn\]: has shape \(2,\); must have one entry",
        ),
        ({"columns": {"lengths": 1}}, "a train batch has its own lengths"),
        ({"columns": {"Turn": 1}}, r"columns\[Turn\]: a column's name must be"),
        ({"columns": {"turn": "one"}}, r"columns\[turn\]: dtype <U3"),
        ({"advantage": np.zeros(4)}, r"sequences\[0\]\.advantage: has shape \(4,\)"),
        ({"loss_mask": [False, True]}, r"sequences\[0\]\.loss_mask: has 2 entries; must have one per token, 5"),
    ],
)
def test_what_does_not_fit_a_sequence_is_refused_with_its_name(change: dict[str, Any], message: str) -> None:
    alone = "loss_mask" not in message and "shape" not in message
    others = [] if alone else [SEQUENCES[1]]
    with pytest.raises(InvalidArgumentError, match=message):
        TrainBatch.pack([replace(SEQUENCES[0], **change), *others])


def test_a_first_token_cannot_be_trained() -> None:
    with pytest.raises(InvalidArgumentError, match="first token"):
        TrainBatch.pack([TrainSequence([5, 6], [True, True], [0, 0], 1.0)])
