"""Train batches survive the wire, and what arrives shares nothing with what was sent."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.tensor_proto import encode_tensor
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import decode_train_batch, encode_train_batch
from nexrl.v1.train_batch_pool_service_pb2 import TrainBatch as TrainBatchMessage


@pytest.mark.guide("B3", "B7", "B10")
def test_a_train_batch_is_read_as_it_was_written(build_batch: Callable[..., TrainBatch]) -> None:
    batch = build_batch(seed=0)
    sent = TrainBatchMessage(batch_id=3, model_tag="default", metrics={"reward_mean": 0.5})
    for name, tensor in encode_train_batch(batch).items():
        sent.tensors[name].CopyFrom(tensor)
    received = TrainBatchMessage.FromString(sent.SerializeToString())
    read = decode_train_batch(received.tensors)
    for field in fields(TrainBatch):
        if field.name != "columns":
            np.testing.assert_array_equal(getattr(read, field.name), getattr(batch, field.name), strict=True)
    assert (received.batch_id, received.model_tag, dict(received.metrics)) == (3, "default", {"reward_mean": 0.5})


@pytest.mark.guide("B4", "B5")
def test_the_size_of_a_batch_is_the_length_of_its_lengths(build_batch: Callable[..., TrainBatch]) -> None:
    tensors = encode_train_batch(build_batch(seed=0, sequences=6))
    assert list(tensors["lengths"].shape) == [6]
    del tensors["lengths"]
    with pytest.raises(InvalidArgumentError, match="lengths: int64"):
        decode_train_batch(tensors)


def test_other_tensors_are_columns_and_a_wrong_length_is_refused_with_its_name(
    build_batch: Callable[..., TrainBatch],
) -> None:
    batch = replace(build_batch(seed=0, sequences=6), columns={"level": np.arange(6), "turn": np.array([True] * 6)})
    read = decode_train_batch(encode_train_batch(batch))
    assert {name: column.tolist() for name, column in read.columns.items()} == {
        "level": [0, 1, 2, 3, 4, 5],
        "turn": [True] * 6,
    }
    tensors = encode_train_batch(batch)
    tensors["level"].CopyFrom(tensors["token_ids"])
    tensors["turn"].CopyFrom(encode_tensor(np.zeros(5, np.float32)))
    with pytest.raises(InvalidArgumentError, match=r"columns\[turn\]: has shape \(5,\); must have one entry per token"):
        decode_train_batch(tensors)


@pytest.mark.guide("B6")
def test_a_batch_that_was_read_is_a_deep_copy(build_batch: Callable[..., TrainBatch]) -> None:
    batch = build_batch(seed=0)
    tensors = encode_train_batch(batch)
    changed = decode_train_batch(tensors)
    arrays = [getattr(changed, field.name) for field in fields(TrainBatch) if field.name != "columns"]
    for values in [*arrays, *changed.columns.values()]:
        if values is not None:
            values[:] = ~values if values.dtype == np.bool_ else values + 1
    untouched = decode_train_batch(tensors)
    for field in fields(TrainBatch):
        np.testing.assert_array_equal(getattr(untouched, field.name), getattr(batch, field.name))
