"""How the decoder layers of a model run in training: checkpointed activations and compiled code."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nexrl.errors import FailedPreconditionError


@dataclass(frozen=True)
class LayerSettings:
    """`trainer.activationCheckpointing` and `trainer.compile`."""

    activation_checkpointing: Literal["none", "full"] = "none"
    compile: bool = False


def set_up_layers(model: PreTrainedModel, settings: LayerSettings) -> None:
    """Have each decoder layer run as `settings` say, from now on.

    Raises FailedPreconditionError for a model whose layers cannot be checkpointed, or if PyTorch cannot compile here.
    """
    if settings == LayerSettings():
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if settings.activation_checkpointing != "none" and not (layers and model.supports_gradient_checkpointing):
        raise FailedPreconditionError(
            f"trainer.activationCheckpointing: full is not supported with {model.config.model_type}, whose layers "
            "transformers cannot run a second time; set none"
        )
    if settings.compile:
        _check_compiler(model.device)
    for layer in layers:
        # Of the instance, and not a wrapper around the layer: the names of weights stay.
        vars(layer)["forward"] = _forward(layer.forward, settings)


def _forward(forward: Callable[..., Any], settings: LayerSettings) -> Callable[..., Any]:
    if settings.activation_checkpointing == "full":
        # No layer draws a random number, because dropout is off. PyTorch's selective checkpointing is not offered: it
        # computes wrong gradients where a model adds in place to a product that it keeps (Gemma 3n).
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return torch.compile(forward, dynamic=True) if settings.compile else forward


def _check_compiler(device: torch.device) -> None:
    try:
        torch.compile(torch.neg, fullgraph=True)(torch.ones(2, device=device))
    except Exception as error:  # Dynamo wraps whatever a compiler raises
        reason = " ".join(str(error).split("\n")[:2])
        raise FailedPreconditionError(
            f"trainer.compile: true, but PyTorch cannot compile on this machine: {reason}; install a C++ compiler (and "
            "Triton, for a GPU), or set false"
        ) from error
