"""AdamW on float32 master weights, and its learning-rate schedule."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nexrl.spec.algorithm import AlgorithmSpec
from nexrl_trainer.tensor_slices import SavedTensors

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, algorithm: AlgorithmSpec, total_steps: int) -> float:
    """Return the rate of the update that follows `step` updates.

    It rises linearly during the warm-up. In the last `decay_steps` updates, or in all others, it falls on a line or on
    half a cosine. The last update, number `total_steps`, has `final_learning_rate_ratio` of the highest rate; so have
    all later ones. With `total_steps` 0 (a trainer that only the Trainer RPCs use) the end is unknown, so the rate
    stays at the highest after the warm-up.
    """
    if step < algorithm.warmup_steps:
        return algorithm.learning_rate * (step + 1) / algorithm.warmup_steps
    if total_steps == 0:
        return algorithm.learning_rate
    last = total_steps - 1
    begin = max(algorithm.warmup_steps, last - (algorithm.decay_steps or last))
    done_ratio = 1.0 if step >= last else max(0, step - begin) / (last - begin)
    if algorithm.learning_rate_decay == "cosine":
        done_ratio = (1 - math.cos(math.pi * done_ratio)) / 2
    return algorithm.learning_rate * (1.0 - (1.0 - algorithm.final_learning_rate_ratio) * done_ratio)


class MasterOptimizer:
    """AdamW (arXiv 1711.05101) that updates float32 masters of a model's weights, and copies them to the model.

    A 16-bit weight has a float32 copy as its master, because most updates would round to nothing in 16 bits. A float32
    weight is its own master. Gradients of 16-bit weights are added up in float32 as each backward pass makes them: over
    1,024 micro-batches a sum in bfloat16 is wrong by 5 %.

    If the model is sharded over several ranks, so are masters and moments: each rank updates its shards.

    The update divides by sqrt(second moment) + `algorithm.eps`. Weight decay is decoupled: each update multiplies a
    weight by 1 - rate * `algorithm.weight_decay`. Without `algorithm.decay_norms_and_biases`, weights of one dimension
    do not decay.
    """

    def __init__(self, model: PreTrainedModel, algorithm: AlgorithmSpec) -> None:
        self._model = model
        self._algorithm = algorithm
        self._masters = {name: _master(parameter) for name, parameter in self._parameters()}
        for name, parameter in self._parameters():
            if self._masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_gradient_mover(self._masters[name]))
        beta1, beta2 = algorithm.betas
        self._adamw = torch.optim.AdamW(
            self._groups(), betas=(beta1, beta2), eps=algorithm.eps, weight_decay=algorithm.weight_decay, fused=True
        )

    def clip_gradient(self) -> float:
        """Scale the gradient down to `algorithm.gradient_clip` if its norm is larger; return the norm before that."""
        masters = list(self._masters.values())
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        if isinstance(norm, DTensor):  # each rank knows the norm of its shards
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(masters, self._algorithm.gradient_clip, norm)
        return float(norm)

    def update(self, rate: float) -> None:
        """Update the weights with the gradient, then clear it."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.clear_gradients()
        with torch.no_grad():
            for name, parameter in self._parameters():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    def clear_gradients(self) -> None:
        """Drop what backward passes have added up."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by `<quantity>.<parameter name>`; it has no moments before the first update."""
        parameters = dict(self._parameters())
        tensors = {f"master.{name}": m.detach() for name, m in self._masters.items() if m is not parameters[name]}
        for name, master in self._masters.items():
            tensors |= {f"{quantity}.{name}": tensor for quantity, tensor in self._adamw.state[master].items()}
        return tensors

    def load_tensors(self, saved: SavedTensors) -> None:
        """Load what `tensors` returned on any number of ranks; each takes its shards.

        The model's weights must be loaded before; gradients are dropped.
        """
        self.clear_gradients()
        self._adamw.state.clear()
        for name, parameter in self._parameters():
            master = self._masters[name]
            if master is not parameter:
                master.detach().copy_(parameter.detach())
                if f"master.{name}" in saved:
                    saved.fill(f"master.{name}", master.detach())
            if f"step.{name}" in saved:
                step = torch.zeros((), device=master.device)
                state = {"step": step} | {moment: torch.zeros_like(master.detach()) for moment in _MOMENTS}
                for quantity, tensor in state.items():
                    saved.fill(f"{quantity}.{name}", tensor)
                self._adamw.state[master] = state

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained: the rest of a model with an adapter is frozen."""
        yield from ((name, each) for name, each in self._model.named_parameters() if each.requires_grad)

    def _groups(self) -> list[dict[str, object]]:
        if self._algorithm.decay_norms_and_biases:
            return [{"params": list(self._masters.values())}]
        matrices = [master for master in self._masters.values() if master.ndim >= 2]
        vectors = [master for master in self._masters.values() if master.ndim < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _master(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()


def _gradient_mover(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a parameter's gradient to the one of its master, and drops it from the parameter."""

    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    return move
