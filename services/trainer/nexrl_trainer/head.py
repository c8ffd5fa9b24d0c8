"""A model's own language-model head, applied to chosen positions only and in float32: the head is the costly part.

Suffixes: _B _T rows and input positions, _P chosen positions, _R any rows, _H hidden size, _V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from nexrl.errors import FailedPreconditionError

ResultT = TypeVar("ResultT")
_Forward: TypeAlias = Callable[..., Any]
_MAX_ROUNDINGS = 16


@dataclass(frozen=True)
class Head:
    """A head and what goes into it.

    `module` is the model's output layer, `hidden_PH` its input at the chosen positions. `after` returns what the model
    makes of the output [R, V] of that layer: a soft cap, a scale or a multiplier is in it, because the model's own code
    runs.
    """

    module: nn.Module
    hidden_PH: Tensor
    after: Callable[[Tensor], Tensor]

    def logits(self) -> Tensor:
        """Return the logits [P, V], float32."""
        if isinstance(self.module, nn.Linear):
            return self.after(linear(self.hidden_PH, self.module.weight, self.module.bias))
        logits_PV: Tensor = self.module(self.hidden_PH)
        return self.after(logits_PV)


def linear(hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return the output [R, V] of a linear layer, computed in float32."""
    return functional.linear(hidden_RH.float(), weight_VH.float(), None if bias_V is None else bias_V.float())


def run_to_head(
    model: PreTrainedModel, positions_P: Tensor, finish: Callable[[Head], ResultT], **inputs: Any
) -> ResultT:
    """Run the model up to its head, and return what `finish` makes of the head at the flat input positions.

    `finish` runs within the model's own forward pass, so the weights of a sharded model are there. The model's code
    around its head runs a second time for `Head.after`, with the first outputs of all other modules.
    """
    own_forward, module = model.forward, model.get_output_embeddings()

    def forward(**inputs: Any) -> ResultT:
        hidden: list[Tensor] = []

        def take_hidden(hidden_BTH: Tensor) -> Tensor:
            hidden.append(hidden_BTH)
            return hidden_BTH.new_zeros(1, 1, 1)

        with _replaced({module: take_hidden}), _recorded(model, module) as outputs:
            own_forward(**inputs)

        def after(logits_RV: Tensor) -> Tensor:
            with _replaced({module: lambda _: logits_RV[None], **outputs}):
                changed_BRV: Tensor = own_forward(**inputs).logits
            return changed_BRV.flatten(0, -2).float()

        return finish(Head(module, hidden[0].flatten(0, 1).index_select(0, positions_P), after))

    with _replaced({model: forward}):
        result: ResultT = model(**inputs, use_cache=False)
    return result


def check_head(model: PreTrainedModel, input_ids_BT: Tensor) -> None:
    """Raise FailedPreconditionError if `Head.logits` is not what the model itself computes for `input_ids_BT`."""
    positions_P = torch.arange(0, input_ids_BT.numel(), 2, device=input_ids_BT.device)
    with torch.inference_mode():
        expected_PV = model(input_ids_BT, use_cache=False).logits.flatten(0, -2)[positions_P].float()
        try:
            found_PV = run_to_head(model, positions_P, Head.logits, input_ids=input_ids_BT)
        except (AttributeError, RuntimeError, TypeError, IndexError) as error:
            raise _unsupported(model, str(error)) from error
    if found_PV.shape != expected_PV.shape:
        raise _unsupported(model, f"its logits have shape {tuple(found_PV.shape)}, not {tuple(expected_PV.shape)}")
    largest, difference = float(expected_PV.abs().max()), float((found_PV - expected_PV).abs().max())
    if not difference <= _MAX_ROUNDINGS * torch.finfo(model.dtype).eps * max(largest, 1e-3):
        raise _unsupported(model, f"logits of up to {largest:.3g} differ by {difference:.3g}")


@contextmanager
def _replaced(forwards: Mapping[nn.Module, _Forward]) -> Iterator[None]:
    """While the block runs, each of these modules calls the given function as its forward."""
    earlier = {module: {"forward": vars(module)["forward"]} for module in forwards if "forward" in vars(module)}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]
            vars(module).update(earlier.get(module, {}))


@contextmanager
def _recorded(model: nn.Module, head: nn.Module) -> Iterator[dict[nn.Module, _Forward]]:
    """Record what the model's parts other than its head return, each as a function that returns it again.

    Only one position is kept: nothing but the head's output is looked at again.
    """
    outputs: dict[nn.Module, _Forward] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        kept = tree_map_only(Tensor, lambda tensor: tensor.detach()[:1, :1] if tensor.ndim > 1 else tensor, output)
        outputs[module] = lambda *args, **kwargs: kept

    hooks = [part.register_forward_hook(record) for part in model.children() if part is not head]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _unsupported(model: PreTrainedModel, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"model.path: {model.config.model_type} is not supported: its head cannot be applied to chosen positions "
        f"({reason})"
    )
