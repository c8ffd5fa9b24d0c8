"""AdamW or Muon on float32 master weights, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nexrl.spec.algorithm import AlgorithmSpec
from nexrl_trainer.tensor_slices import SavedTensors

_MUON_STATE = ("momentum_buffer",)
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


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
    """AdamW or Muon, which updates float32 masters of a model's weights, and copies them to the model.

    A 16-bit weight has a float32 copy as its master, because most updates would round to nothing in 16 bits. A float32
    weight is its own master. Gradients of 16-bit weights are added up in float32 as each backward pass makes them: over
    1,024 micro-batches a sum in bfloat16 is wrong by 5 %.

    If the model is sharded over several ranks, so are masters and moments: each rank updates its shards.

    AdamW (arXiv 1711.05101) divides by sqrt(second moment) + `algorithm.eps`. Weight decay is decoupled: each update
    multiplies a weight by 1 - rate * `algorithm.weight_decay`. Without `algorithm.decay_norms_and_biases`, weights of
    one dimension do not decay.

    Muon (arXiv 2502.16982) moves each matrix of the layers by an orthogonal one near its momentum. AdamW updates the
    rest, such as embeddings and head. Updates of Muon are scaled to the usual size of AdamW's, 0.2 times the rate, so
    rate and decay mean the same.
    """

    def __init__(self, model: PreTrainedModel, algorithm: AlgorithmSpec) -> None:
        self._model = model
        self._algorithm = algorithm
        self._masters = {name: _master(parameter) for name, parameter in self._parameters()}
        for name, parameter in self._parameters():
            if self._masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_gradient_mover(self._masters[name]))
        self._hidden = hidden_matrices(model) if algorithm.optimizer == "muon" else frozenset()
        beta1, beta2 = algorithm.betas
        adamw = torch.optim.AdamW(
            self._groups(), betas=(beta1, beta2), eps=algorithm.eps, weight_decay=algorithm.weight_decay, fused=True
        )
        self._optimizers: list[torch.optim.Optimizer] = [adamw]
        if self._hidden:
            hidden = [self._masters[name] for name in self._masters if name in self._hidden]
            muon = torch.optim.Muon(hidden, weight_decay=algorithm.weight_decay, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)

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
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.clear_gradients()
        with torch.no_grad():
            for name, parameter in self._parameters():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    def clear_gradients(self) -> None:
        """Drop what backward passes have added up."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by `<quantity>.<parameter name>`; it has no moments before the first update."""
        parameters = dict(self._parameters())
        tensors = {f"master.{name}": m.detach() for name, m in self._masters.items() if m is not parameters[name]}
        for name, master in self._masters.items():
            state = self._optimizer_of(name).state[master]
            tensors |= {f"{quantity}.{name}": tensor for quantity, tensor in state.items()}
        return tensors

    def load_tensors(self, saved: SavedTensors) -> None:
        """Load what `tensors` returned on any number of ranks; each takes its shards.

        The model's weights must be loaded before; gradients are dropped. Weights that another optimizer has updated
        begin without moments.
        """
        self.clear_gradients()
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for name, parameter in self._parameters():
            master = self._masters[name]
            if master is not parameter:
                master.detach().copy_(parameter.detach())
                if f"master.{name}" in saved:
                    saved.fill(f"master.{name}", master.detach())
            quantities = _MUON_STATE if name in self._hidden else _ADAMW_STATE
            if all(f"{quantity}.{name}" in saved for quantity in quantities):
                state = {quantity: _empty(quantity, master) for quantity in quantities}
                for quantity, tensor in state.items():
                    saved.fill(f"{quantity}.{name}", tensor)
                self._optimizer_of(name).state[master] = state

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer:
        return self._optimizers[name in self._hidden]

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained: the rest of a model with an adapter is frozen."""
        yield from ((name, each) for name, each in self._model.named_parameters() if each.requires_grad)

    def _groups(self) -> list[dict[str, object]]:
        """Return what AdamW updates, by how it decays."""
        masters = [master for name, master in self._masters.items() if name not in self._hidden]
        if self._algorithm.decay_norms_and_biases:
            return [{"params": masters}]
        matrices = [master for master in masters if master.ndim >= 2]
        vectors = [master for master in masters if master.ndim < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def hidden_matrices(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the trained matrices of `model` that are neither embeddings nor its head.

    Experts that a model keeps together in one tensor of three dimensions are not among them.
    """
    tables: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()
    others = {id(each) for module in (*tables, *filter(None, [head])) for each in module.parameters()}
    named = model.named_parameters()
    return frozenset(n for n, each in named if each.requires_grad and each.ndim == 2 and id(each) not in others)


def _empty(quantity: str, master: Tensor) -> Tensor:
    return torch.zeros((), device=master.device) if quantity == "step" else torch.zeros_like(master.detach())


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
