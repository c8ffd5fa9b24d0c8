"""Columns of trajectories that the pool receives: valid ones are stored, others are refused by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from nexrl.column_proto import encode_columns
from nexrl.errors import InvalidArgumentError
from nexrl.tensor_proto import encode_tensor
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1.tensor_pb2 import Tensor
from nexrl_trajectory_pool.results import produced_samples
from tests.support.pool import scored, trajectory


def payload(columns: Mapping[str, Tensor]) -> bytes:
    """A sample whose trajectory of four tokens has these columns, as bytes."""
    one = trajectory()
    for name, tensor in columns.items():
        one.columns[name].CopyFrom(tensor)
    return scored(pb.SampleLease(sample_id="0.0", attempt=1), one).SerializeToString()


def test_a_value_per_token_or_one_for_the_trajectory_is_stored() -> None:
    sent = payload(encode_columns({"turn": [0, 0, 1, 1], "difficulty": 0.5, "is_hard": True}))
    stored = produced_samples([sent], [])[0].payload
    assert stored == sent


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"turn": [0, 1]},
            r"columns\[turn\]: shape \[2\]; must be \[4\] \(a value per token\) or \[\] \(one value\)",
        ),
        ({"turn": [[0, 0, 1, 1]]}, r"columns\[turn\]: shape \[1, 4\]"),
        ({"token_rewards": 1.0}, r"columns\[token_rewards\]: shape \[\]; must be \[4\], a reward per token"),
        ({"token_rewards": [0, 0, float("nan"), 1]}, r"columns\[token_rewards\]: must be finite numbers"),
        ({"gain": float("nan")}, r"columns\[gain\]: must be finite numbers"),
        ({"advantages": 1.0}, r"columns\[advantages\]: a train batch has its own advantages"),
        ({"a b": 1.0}, r"columns\[a b\]: a column's name must be"),
        ({f"c{number}": 1 for number in range(33)}, "columns: 33 columns; at most 32"),
    ],
)
def test_a_column_that_does_not_fit_is_refused_with_its_name(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"results\[0\]\.trajectories\[0\]\.{message}"):
        produced_samples([payload(encode_columns(columns))], [])


def test_bytes_that_do_not_fill_the_shape_are_refused() -> None:
    broken = encode_tensor(np.zeros(4, np.float32))
    broken.content = broken.content[:-1]
    with pytest.raises(InvalidArgumentError, match=r"columns\[turn\].*15 bytes do not fill shape \[4\]"):
        produced_samples([payload({"turn": broken})], [])
