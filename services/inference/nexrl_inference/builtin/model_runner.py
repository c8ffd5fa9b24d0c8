"""Runs one model with its key-value slots: takes token ids, returns logits.

Shapes: P prompts, R = rows that a prefill fills, B = rows in use, T tokens, L = longest row, V vocabulary, H hidden.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from nexrl.errors import InvalidArgumentError
from nexrl_inference.builtin.kv_cache import ATTENTION, DecodeView, KVSlots, PrefillView, slot_attention
from nexrl_inference.builtin.scheduler import Limits


class ModelRunner:
    """Runs any Hugging Face causal language model with full attention, in its own dtype and on its own device.

    The runner modifies the model: it replaces the attention implementation and overwrites the weights in place.
    Raises InvalidArgumentError for a model that cannot run this way within the limits.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits) -> None:
        _check_context(model, limits.max_tokens_per_row)
        AttentionInterface.register(ATTENTION, slot_attention)
        model.set_attn_implementation(ATTENTION)
        model.train(False)
        self._model = model
        self._output_layer = _output_layer(model)
        self._slots = KVSlots(limits.max_rows, limits.max_tokens_per_row)
        self.vocabulary: int = model.get_input_embeddings().get_parameter("weight").shape[0]
        self._try_model()

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]], first_row: int, prompt_of_row: Sequence[int]) -> Tensor:
        """Run the model once on each of P sequences, and store their keys and values in the rows from `first_row` on.

        Row `first_row + i` gets sequence `prompt_of_row[i]`. Returns logits after each sequence's last token [P, V].
        """
        longest = max(map(len, sequences))
        # Padding is on the right, where causal attention never sees it; decoding overwrites its slots.
        input_ids_PT = self._tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
        positions_T = torch.arange(longest, device=self._model.device)
        is_visible_TT = positions_T <= positions_T[:, None]
        view = PrefillView(self._slots, first_row, self._tensor(prompt_of_row))
        with self._logits_only_at(self._tensor([len(sequence) - 1 for sequence in sequences])):
            return self._forward(input_ids_PT, positions_T[None], is_visible_TT[None, None], view)

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token, at its position, to each of rows 0..B-1. Returns the logits after it [B, V]."""
        positions_B = self._tensor(positions)
        is_visible_BL = torch.arange(max(positions) + 1, device=self._model.device) <= positions_B[:, None]
        view = DecodeView(self._slots, positions_B, max(positions) + 1)
        return self._forward(self._tensor(token_ids)[:, None], positions_B[:, None], is_visible_BL[:, None, None], view)

    @torch.inference_mode()
    def move_rows(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` slots of the source rows over the target rows."""
        self._slots.move(self._tensor(sources), self._tensor(targets), tokens)

    @torch.inference_mode()
    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` over the live weights. Raises InvalidArgumentError, and copies nothing, if it does not match."""
        for live, new in matched_weights(state, self._model.state_dict()):
            live.copy_(new)

    def _forward(
        self, input_ids: Tensor, positions: Tensor, is_visible: Tensor, view: DecodeView | PrefillView
    ) -> Tensor:
        output = self._model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=is_visible,
            past_key_values=view,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    @contextmanager
    def _logits_only_at(self, last_P: Tensor) -> Generator[None, None, None]:
        """Compute logits at one position per sequence inside this block. Whole prompts would need too much memory."""

        def pick(_: torch.nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            (hidden_PTH,) = arguments
            return (hidden_PTH[torch.arange(len(last_P), device=last_P.device), last_P][:, None],)

        hook = self._output_layer.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            hook.remove()

    def _try_model(self) -> None:
        """Run one token, so that an unsupported model is refused at start and not at the first request."""
        self.prefill([[0]], first_row=0, prompt_of_row=[0])
        layers = self._model.config.get_text_config().num_hidden_layers
        if self._slots.layers != layers:
            raise InvalidArgumentError(
                f"{self._slots.layers} of the model's {layers} layers use attention with keys and values; all must"
            )

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._model.device)


def matched_weights(state: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (live tensor, new tensor), one per live tensor. `state` may use any of the names of a tied tensor.

    Raises InvalidArgumentError, which names each tensor that is missing, unexpected or of another shape.
    """
    unexpected = sorted(set(state) - set(live))
    new_by_storage = {live[name].data_ptr(): state[name] for name in state if name in live}
    missing = [name for name, tensor in live.items() if tensor.data_ptr() not in new_by_storage]
    misshapen = [
        f"{name}: {tuple(state[name].shape)} for {tuple(live[name].shape)}"
        for name in state
        if name in live and state[name].shape != live[name].shape
    ]
    faults = {"missing": missing, "unexpected": unexpected, "shape differs": misshapen}
    if any(faults.values()):
        text = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise InvalidArgumentError(f"the weights do not match the model ({text})")
    live_by_storage = {tensor.data_ptr(): tensor for tensor in live.values()}
    return [(tensor, new_by_storage[pointer]) for pointer, tensor in live_by_storage.items()]


def _output_layer(model: PreTrainedModel) -> torch.nn.Module:
    untyped: Any = model  # transformers has no types for this method
    layer = untyped.get_output_embeddings()
    if not isinstance(layer, torch.nn.Module):
        raise InvalidArgumentError(f"{type(model).__name__} has no output layer: it is not a causal language model")
    return layer


def _check_context(model: PreTrainedModel, max_tokens_per_row: int) -> None:
    """Raise InvalidArgumentError if rows may be longer than the model's context."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "sliding_window", "attention_chunk_size"):
        limit = getattr(config, name, None)
        if limit is not None and max_tokens_per_row > limit:
            raise InvalidArgumentError(
                f"max_tokens_per_row is {max_tokens_per_row}; must be at most {limit}, the model's {name}"
            )
