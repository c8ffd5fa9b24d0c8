"""Tensors on the wire: what is written is read, and nothing else is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from nexrl.errors import InvalidArgumentError
from nexrl.tensor_proto import decode_tensor, decode_tensors, encode_tensor, encode_tensors
from nexrl.v1 import tensor_pb2 as pb

DTYPES = ["<f4", ">f4", "<f2", "<i4", ">i8", "<i8", "?"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@given(array=arrays)
def test_an_array_is_read_as_it_was_written(array: NDArray[np.generic]) -> None:
    read = decode_tensor("x", encode_tensor(array))
    assert read.dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(read, array)


def test_arrays_that_are_not_contiguous_are_written_row_by_row() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    np.testing.assert_array_equal(decode_tensors(encode_tensors({"a": array}))["a"], array)


def test_a_type_that_the_wire_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="complex128; allowed"):
        encode_tensor(np.zeros(2, np.complex128))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (pb.Tensor(data_type=pb.DATA_TYPE_FLOAT32, shape=[2], content=b"1234"), r"x.content: 4 bytes do not fill"),
        (pb.Tensor(data_type=pb.DATA_TYPE_INT64, shape=[-1, -1], content=b"12345678"), "x.content"),
        (pb.Tensor(shape=[0]), "x.data_type: DATA_TYPE_UNSPECIFIED"),
        (pb.Tensor(data_type=pb.DATA_TYPE_BFLOAT16, shape=[0]), "x.data_type: DATA_TYPE_BFLOAT16"),
        (pb.Tensor.FromString(b"\x08\x63"), "x.data_type: 99; allowed"),
        (pb.Tensor(data_type=pb.DATA_TYPE_INT64, shape=[2**62, 4, 0]), "x.shape: "),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused_by_name(tensor: pb.Tensor, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        decode_tensor("x", tensor)
