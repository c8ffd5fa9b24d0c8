"""Converts NumPy arrays to and from nexrl.v1.Tensor."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexrl.errors import InvalidArgumentError
from nexrl.v1 import tensor_pb2 as pb

_DTYPES: dict["pb.DataType.ValueType", np.dtype[Any]] = {
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    pb.DATA_TYPE_INT32: np.dtype("<i4"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
    pb.DATA_TYPE_BOOL: np.dtype("?"),
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}


def encode_tensor(array: NDArray[Any]) -> pb.Tensor:
    """Return the array as a message, row-major and little-endian. Raises InvalidArgumentError for other dtypes."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _DATA_TYPES:
        raise InvalidArgumentError(f"tensor: dtype {array.dtype}; allowed: {sorted(map(str, _DATA_TYPES))}")
    content = np.ascontiguousarray(array, dtype).tobytes()
    return pb.Tensor(data_type=_DATA_TYPES[dtype], shape=array.shape, content=content)


def decode_tensor(name: str, tensor: pb.Tensor) -> NDArray[Any]:
    """Return the message as a read-only array. Raises InvalidArgumentError if its size does not fit its shape.

    The error names the tensor by `name`.
    """
    dtype = _DTYPES.get(tensor.data_type)
    if dtype is None:
        allowed = ", ".join(map(pb.DataType.Name, _DTYPES))
        # An unknown number of a newer client has no name.
        found = pb.DataType.Name(tensor.data_type) if tensor.data_type in pb.DataType.values() else tensor.data_type
        raise InvalidArgumentError(f"{name}.data_type: {found}; allowed: {allowed}")
    if any(length < 0 for length in tensor.shape) or math.prod(tensor.shape) * dtype.itemsize != len(tensor.content):
        raise InvalidArgumentError(
            f"{name}.content: {len(tensor.content)} bytes do not fill shape {list(tensor.shape)} of {dtype}"
        )
    try:
        return np.frombuffer(tensor.content, dtype).reshape(tuple(tensor.shape))
    except ValueError as error:  # an empty shape such as [2**62, 4, 0], or one of too many dimensions
        raise InvalidArgumentError(f"{name}.shape: {list(tensor.shape)}: {error}") from None


def encode_tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, pb.Tensor]:
    """Return named messages for named arrays."""
    return {name: encode_tensor(array) for name, array in arrays.items()}


def decode_tensors(tensors: Mapping[str, pb.Tensor]) -> dict[str, NDArray[Any]]:
    """Return named arrays for named messages."""
    return {name: decode_tensor(f"tensors[{name}]", tensor) for name, tensor in tensors.items()}
