"""Columns: named extra values of a trajectory, for the algorithm processor and the loss."""

import re
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nexrl.errors import InvalidArgumentError

OWN_TENSORS = frozenset({"token_ids", "loss_mask", "rollout_logprobs", "advantages", "lengths", "reference_logprobs"})
"""The names of tensors that a train batch has anyway. No column may have one of these names."""
TOKEN_REWARDS = "token_rewards"
"""The column with the part of the trajectory's reward that belongs to each token; advantages of tokens use it."""
ValueT = TypeVar("ValueT")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DTYPES = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}


class Columns(dict[str, ValueT]):
    """Columns by name. A missing one is a KeyError that lists those that are there."""

    def __missing__(self, name: str) -> ValueT:
        raise KeyError(f"no column {name}; there are: {', '.join(sorted(self)) or 'none'}")


def column_array(name: str, values: ArrayLike) -> NDArray[Any]:
    """Return the column as float32, int64 or bool.

    Raises InvalidArgumentError, if it holds anything else or a number that is too large for its dtype.
    """
    array = np.asarray(values)
    if array.dtype.kind not in _DTYPES:
        raise InvalidArgumentError(f"columns[{name}]: dtype {array.dtype}; must be numbers or booleans")
    stored: NDArray[Any] = array.astype(_DTYPES[array.dtype.kind], copy=False)
    is_too_large = (stored < 0) & (array > 0) if array.dtype.kind == "u" else np.isinf(stored) & ~np.isinf(array)
    if is_too_large.any():
        raise InvalidArgumentError(f"columns[{name}]: a number is too large for {stored.dtype}")
    return stored


def column_name_fault(name: str) -> str:
    """Return what is wrong with the name of a column; empty if it is valid."""
    if name in OWN_TENSORS:
        return f"a train batch has its own {name}; choose another name"
    if not _NAME.fullmatch(name):
        return "a column's name must be 1 to 64 lower-case letters, digits and underscores, with a letter first"
    return ""
