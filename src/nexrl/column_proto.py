"""Encodes the columns of trajectories as tensor messages, and checks received ones."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike

from nexrl.columns import TOKEN_REWARDS, column_array, column_name_fault
from nexrl.errors import InvalidArgumentError, Violation
from nexrl.tensor_proto import decode_tensor, encode_tensor
from nexrl.v1 import tensor_pb2 as pb

MAX_COLUMNS = 32


def encode_columns(columns: Mapping[str, ArrayLike]) -> dict[str, pb.Tensor]:
    """Return the columns for `Trajectory.columns`. Each has one value per token, or one value for the trajectory."""
    return {name: encode_tensor(column_array(name, values)) for name, values in columns.items()}


def column_violations(path: str, columns: Mapping[str, pb.Tensor], tokens: int) -> Iterator[Violation]:
    """Yield what is wrong with the columns of the trajectory at `path`, which has `tokens` tokens."""
    if len(columns) > MAX_COLUMNS:
        yield Violation(f"{path}.columns", f"{len(columns)} columns; at most {MAX_COLUMNS}")
        return
    for name, tensor in columns.items():
        field, shape = f"{path}.columns[{name}]", list(tensor.shape)
        if fault := column_name_fault(name):
            yield Violation(field, fault)
        elif name == TOKEN_REWARDS and shape != [tokens]:
            yield Violation(field, f"shape {shape}; must be [{tokens}], a reward per token")
        elif shape not in ([], [tokens]):
            yield Violation(field, f"shape {shape}; must be [{tokens}] (a value per token) or [] (one value)")
        else:
            yield from _content_violations(field, tensor)


def _content_violations(field: str, tensor: pb.Tensor) -> Iterator[Violation]:
    try:
        if not np.isfinite(decode_tensor(field, tensor)).all():
            yield Violation(field, "must be finite numbers")
    except InvalidArgumentError as error:
        yield Violation(field, error.message)
