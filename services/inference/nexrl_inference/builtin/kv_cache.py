"""Keys and values of the rows in flight, in preallocated slots, behind the Cache interface of transformers.

A forward sees the slots through one of two views: `PrefillView` stores whole prompts and expands each into the rows
of its samples, `DecodeView` appends one token to each row. Shapes: R rows, H key-value heads, T tokens, D head size,
P prompts, B = rows in use, L = longest row in use.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from nexrl.errors import InvalidArgumentError

ATTENTION = "nexrl_slots"  # the name under which `slot_attention` is registered with transformers


class KVSlots:
    """One [R, H, T, D] tensor of keys and one of values per layer.

    Allocated when a layer first stores something, because only the model knows its heads and head sizes.
    """

    def __init__(self, max_rows: int, max_tokens_per_row: int) -> None:
        self._shape = (max_rows, max_tokens_per_row)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def layers(self) -> int:
        return len(self._keys)

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of a layer, allocated to match the given states [., H, ., D]."""
        if index not in self._keys:
            rows, tokens = self._shape
            self._keys[index] = keys.new_zeros(rows, keys.shape[1], tokens, keys.shape[3])
            self._values[index] = values.new_zeros(rows, values.shape[1], tokens, values.shape[3])
        return self._keys[index], self._values[index]

    def move(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copy the first `tokens` entries of the source rows (i64 indices) over the target rows."""
        for slots in (*self._keys.values(), *self._values.values()):
            slots[targets, :, :tokens] = slots[sources, :, :tokens]


class _View(Cache):
    """What both views share: they hold no state of their own, so the base class's layers stay empty."""

    def __init__(self, slots: KVSlots) -> None:
        super().__init__(layers=[])
        self._slots = slots


class PrefillView(_View):
    """Stores the states of P prompts in rows `first_row`...: row r gets prompt `prompt_of_row_R[r]`.

    Attention sees the prompts only, once each.
    """

    def __init__(self, slots: KVSlots, first_row: int, prompt_of_row_R: Tensor) -> None:
        super().__init__(slots)
        self._rows = slice(first_row, first_row + len(prompt_of_row_R))
        self._prompt_of_row_R = prompt_of_row_R

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._slots.layer(layer_idx, key_states, value_states)
        tokens = key_states.shape[2]
        keys[self._rows, :, :tokens] = key_states[self._prompt_of_row_R]
        values[self._rows, :, :tokens] = value_states[self._prompt_of_row_R]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class DecodeView(_View):
    """Stores one token for each of the first B rows, at `positions_B`; attention sees these rows up to the longest."""

    def __init__(self, slots: KVSlots, positions_B: Tensor, longest: int) -> None:
        super().__init__(slots)
        self._rows_B = torch.arange(len(positions_B), device=positions_B.device)
        self._positions_B = positions_B
        self._longest = longest

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._slots.layer(layer_idx, key_states, value_states)
        keys[self._rows_B, :, self._positions_B] = key_states[:, :, 0]
        values[self._rows_B, :, self._positions_B] = value_states[:, :, 0]
        rows = len(self._rows_B)
        return keys[:rows, :, : self._longest], values[:rows, :, : self._longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest - 1


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, heads, T, D] queries over [B, H, L, D] states; True in the mask means visible.

    transformers' own "sdpa" repeats keys and values for grouped-query attention whenever there is a mask; on
    a CPU a fifth of a decode step of SmolLM2-135M (64 rows of 100 tokens) would go there. Raises InvalidArgumentError
    for attention variants that scaled_dot_product_attention cannot express.
    """
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported:
        raise InvalidArgumentError(f"the engine cannot run attention with {', '.join(unsupported)}")
    output_BHTD = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output_BHTD.transpose(1, 2), None
