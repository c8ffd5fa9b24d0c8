"""A reference model that follows the policy: refreshed every few steps, or a moving average."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nexrl.spec.reference_model import AveragedReference, ReferenceSpec, RefreshedReference
from nexrl_trainer.tensor_slices import SavedTensors


class MovingReference:
    """The weights of a reference model, float32, beside those of the policy `model`, and sharded like them.

    It begins as `model` is. It is computed with at the beginning of a step, when it is known, and not ahead of
    training. A checkpoint contains it, so a replayed step has the same reference.

    Source: TR-DPO (arXiv 2404.09656): a moving average is its soft update, a refreshed model its hard update.
    """

    def __init__(self, model: PreTrainedModel, follows: ReferenceSpec) -> None:
        self._policy = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._weights = {name: weight.to(torch.float32, copy=True) for name, weight in self._policy.items()}
        self._follows = follows

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """While the block runs, the model computes what the reference model does. It must not be trained then."""
        own = {name: weight.clone() for name, weight in self._policy.items()}
        try:
            self._load(self._weights)
            yield
        finally:
            self._load(own)

    def follow(self, step: int) -> None:
        """Follow the policy, which has made `step` steps."""
        match self._follows:
            case RefreshedReference(every_steps=steps):
                if step % steps == 0:
                    for name, weight in self._weights.items():
                        weight.copy_(self._policy[name])
            case AveragedReference(decay=decay):
                for name, weight in self._weights.items():
                    weight.mul_(decay).add_(self._policy[name].float(), alpha=1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs."""
        return {f"reference.{name}": weight for name, weight in self._weights.items()}

    def load_tensors(self, saved: SavedTensors) -> None:
        """Load what `tensors` returned on any number of ranks. After a frozen one it begins as the initial model."""
        for name, tensor in self.tensors().items():
            if name in saved:
                saved.fill(name, tensor)

    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self._policy.items():
            weight.copy_(weights[name])
