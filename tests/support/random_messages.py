"""Random messages for the methods of a service: hostile values in every field, and bytes that are no message."""

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from nexrl.tensor_proto import encode_tensors
from nexrl.v1.tensor_pb2 import Tensor

TEXTS = [
    "default",
    "0.0",
    "99.0",
    "\x00",
    "ä\u2028\U0001f600",
    "x" * 500,
    "../../etc",
    "-1",
    "1e999",
    "{}",
    '{"prompt": "a"}',
]
FLOATS = [0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf")]
VALUES: Mapping[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
    FieldDescriptor.CPPTYPE_INT32: [0, 1, 2, -1, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [0, 1, 2, -1, 2**53 + 1, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_DOUBLE: FLOATS,
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 3, 99, -1],
}
LEFT_OUT = 0.15
"""Share of the fields that a message lacks."""
MAX_DEPTH = 4


class Messages:
    """Makes messages from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def content(self, kind: Descriptor) -> bytes:
        """Return the bytes of a message of this kind; of each third one, changed at random places."""
        content = self._message(kind).SerializeToString()
        return content if self.random.random() < 2 / 3 else self._mutated(content)

    def _message(self, kind: Descriptor, depth: int = 0) -> Message:
        message = GetMessageClass(kind)()
        for field in kind.fields:
            if field.name == "request_id":
                setattr(message, field.name, self.random.choice(["one", "two", str(self.random.random())]))
            elif field.name == "model_tag" and self.random.random() < 0.9:
                setattr(message, field.name, "default")
            elif self.random.random() > LEFT_OUT and (field.message_type is None or depth < MAX_DEPTH):
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        value = partial(self._value, depth=depth)
        content = getattr(message, field.name)
        if field.message_type and field.message_type.GetOptions().map_entry:
            key, item = field.message_type.fields
            if item.message_type is Tensor.DESCRIPTOR and self.random.random() < 0.8:
                for name, tensor in self._train_batch().items():
                    content[name].CopyFrom(tensor)
                return
            for _ in range(self.random.randrange(3)):
                if item.message_type:
                    content[value(key)].CopyFrom(value(item))
                else:
                    content[value(key)] = value(item)
        elif field.is_repeated:
            content.extend(value(field) for _ in range(self.random.randrange(4)))
        elif field.message_type:
            content.CopyFrom(value(field))
        else:
            setattr(message, field.name, value(field))

    def _value(self, field: FieldDescriptor, depth: int) -> Any:
        if field.message_type:
            return self._message(field.message_type, depth + 1)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.randbytes(self.random.choice([0, 1, 8, 20]))
        return self.random.choice(VALUES[field.cpp_type])

    def _train_batch(self) -> Mapping[str, Tensor]:
        """Return the tensors of a batch of up to four tokens. Each may be missing, too short, or hostile."""
        size = self.random.randrange(5)
        lengths = self.random.choice([[size], [size], [size], [0, size], [-1, size + 1], [size + 1], [2**62, 2**62]])
        arrays = {
            "token_ids": np.array(self._several([4, 5, 5, 6, -1, 10**6, 2**63 - 1], size), np.int64),
            "loss_mask": np.array(self._several([False, True], size), np.bool_),
            "rollout_logprobs": np.array(self._several(FLOATS, size), np.float32),
            "advantages": np.array(self._several(FLOATS, size), np.float32),
            "lengths": np.array(lengths, np.int64),
            self.random.choice(["reference_logprobs", "column"]): np.array(self._several(FLOATS, size), np.float32),
        }
        kept = {name: array for name, array in arrays.items() if self.random.random() > 0.03}
        return encode_tensors({name: array[self.random.random() < 0.03 :] for name, array in kept.items()})

    def _several(self, values: list[Any], count: int) -> list[Any]:
        """Return `count` of the values; half of the time only the harmless ones, which are in front."""
        harmless = self.random.random() < 0.5
        return self.random.choices(values[:2] if harmless else values, k=count)

    def _mutated(self, content: bytes) -> bytes:
        at = self.random.randrange(len(content) + 1)
        inserted = self.random.randbytes(self.random.randrange(9))
        return self.random.choice(
            [
                content[:at],
                content[:at] + inserted + content[at:],
                content[:at] + inserted + content[at + len(inserted) :],
            ]
        )
