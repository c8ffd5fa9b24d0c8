"""Applies a model's own language-model head to chosen positions only, in float32: the head is the costly part.

Suffixes: _B _T rows and input positions, _P chosen positions, _H hidden size, _V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from nexrl.errors import FailedPreconditionError

_MAX_ROUNDINGS = 16


def head_logits(model: PreTrainedModel, positions_P: Tensor, **inputs: Any) -> Tensor:
    """Return the logits [P, V], float32, at the flat input positions `positions_P`.

    The whole model runs, and only its output layer is told to look at fewer positions. What a model does around its
    head (a soft cap, a scale, a multiplier) is therefore applied as the model applies it.
    """
    with _head_at(model.get_output_embeddings(), positions_P):
        logits_BPV: Tensor = model(**inputs, use_cache=False).logits
    return logits_BPV.flatten(0, -2).float()


def check_head(model: PreTrainedModel, input_ids_BT: Tensor) -> None:
    """Raise FailedPreconditionError if `head_logits` is not what the model itself computes for `input_ids_BT`."""
    positions_P = torch.arange(0, input_ids_BT.numel(), 2, device=input_ids_BT.device)
    with torch.inference_mode():
        expected_PV = model(input_ids_BT, use_cache=False).logits.flatten(0, -2)[positions_P].float()
        try:
            found_PV = head_logits(model, positions_P, input_ids=input_ids_BT)
        except (AttributeError, RuntimeError, TypeError, IndexError) as error:
            raise _unsupported(model, str(error)) from error
    if found_PV.shape != expected_PV.shape:
        raise _unsupported(model, f"its logits have shape {tuple(found_PV.shape)}, not {tuple(expected_PV.shape)}")
    largest, difference = float(expected_PV.abs().max()), float((found_PV - expected_PV).abs().max())
    if not difference <= _MAX_ROUNDINGS * torch.finfo(model.dtype).eps * max(largest, 1e-3):
        raise _unsupported(model, f"logits of up to {largest:.3g} differ by {difference:.3g}")


@contextmanager
def _head_at(head: nn.Module, positions_P: Tensor) -> Iterator[None]:
    """While the block runs, `head` returns the logits [1, P, V] of `positions_P` only."""
    own_forward = head.forward

    def forward(hidden_BTH: Tensor) -> Tensor:
        hidden_PH = hidden_BTH.flatten(0, 1).index_select(0, positions_P)
        if not isinstance(head, nn.Linear):
            logits_PV: Tensor = own_forward(hidden_PH)
            return logits_PV[None]
        bias_V = None if head.bias is None else head.bias.float()
        # Not a view of the logits: FSDP warns of in-place operations on what a model returns, which a view may hide.
        return functional.linear(hidden_PH.float()[None], head.weight.float(), bias_V)

    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]


def _unsupported(model: PreTrainedModel, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"model.path: {model.config.model_type} is not supported: its head cannot be applied to chosen positions "
        f"({reason})"
    )
