"""NumPy arrays <-> nexrl.v1.Tensor."""

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
    """The array as a message, row-major and little-endian. Raises InvalidArgumentError for a dtype the wire has not."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _DATA_TYPES:
        raise InvalidArgumentError(f"tensor: dtype {array.dtype}; allowed: {sorted(map(str, _DATA_TYPES))}")
    content = np.ascontiguousarray(array, dtype).tobytes()
    return pb.Tensor(data_type=_DATA_TYPES[dtype], shape=array.shape, content=content)


def decode_tensor(name: str, tensor: pb.Tensor) -> NDArray[Any]:
    """The message as a read-only array. Raises InvalidArgumentError, naming `name`, when content and shape disagree."""
    dtype = _DTYPES.get(tensor.data_type)
    if dtype is None:
        raise InvalidArgumentError(f"{name}.data_type: {pb.DataType.Name(tensor.data_type)} is not read here")
    if any(length < 0 for length in tensor.shape) or math.prod(tensor.shape) * dtype.itemsize != len(tensor.content):
        raise InvalidArgumentError(
            f"{name}.content: {len(tensor.content)} bytes do not fill shape {list(tensor.shape)} of {dtype}"
        )
    return np.frombuffer(tensor.content, dtype).reshape(tuple(tensor.shape))


def encode_tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, pb.Tensor]:
    """Named arrays as named messages."""
    return {name: encode_tensor(array) for name, array in arrays.items()}


def decode_tensors(tensors: Mapping[str, pb.Tensor]) -> dict[str, NDArray[Any]]:
    """Named messages as named arrays."""
    return {name: decode_tensor(f"tensors[{name}]", tensor) for name, tensor in tensors.items()}
