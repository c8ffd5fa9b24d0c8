"""The critic of PPO: a second model, which predicts the return of each token.

Suffixes: _N tokens of a batch, _P trained tokens of a micro-batch, _H hidden size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from nexrl.critic_columns import RETURNS, VALUES
from nexrl.errors import FailedPreconditionError
from nexrl.spec.critic import Ppo
from nexrl.train_batch import TrainBatch
from nexrl_trainer.batching import token_weights
from nexrl_trainer.forward import ForwardPass, ForwardSettings
from nexrl_trainer.head import Head, linear
from nexrl_trainer.layers import LayerSettings, set_up_layers
from nexrl_trainer.micro_batch import MicroBatch
from nexrl_trainer.optimizer import MasterOptimizer, learning_rate
from nexrl_trainer.ranks import Ranks
from nexrl_trainer.tensor_slices import SavedTensors

_PREFIX = "critic."


@dataclass(frozen=True)
class CriticSettings:
    """What a critic needs besides its model. `forward`, `layers` and `shares_prompts` are those of the policy."""

    algorithm: Ppo
    total_steps: int
    forward: ForwardSettings
    layers: LayerSettings
    shares_prompts: bool


def give_value_head(model: PreTrainedModel) -> None:
    """Replace the language-model head by one of a single output without bias, which is 0 for every input."""
    weight: Tensor = next(model.get_output_embeddings().parameters())  # [vocabulary, hidden size]
    value_head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(value_head.weight)
    model.set_output_embeddings(value_head)


class Critic:
    """Trains `model`, which has a value head, beside the policy. Each of several ranks has one, as it has a learner.

    The value of a trained token is that of its context: the output of the head at the token before it.
    """

    def __init__(self, model: PreTrainedModel, settings: CriticSettings, ranks: Ranks) -> None:
        self._settings, self._ranks, self._model = settings, ranks, model
        algorithm = settings.algorithm
        self._forward_pass = ForwardPass(model, settings.forward, shares_prompts=settings.shares_prompts, ranks=ranks)
        set_up_layers(model, settings.layers)
        ranks.shard(model)
        self._algorithm = algorithm.model_copy(update={"learning_rate": algorithm.critic.learning_rate})
        self._optimizer = MasterOptimizer(model, self._algorithm)

    def values(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the value of each trained token, 0 elsewhere. Shape [N]."""
        values_N = np.zeros(len(batch.token_ids_N), np.float32)
        with torch.no_grad():
            for micro in self._forward_pass.micro_batches(batch):
                values_N[micro.tokens_P] = self._values(micro).cpu()
        of_all_ranks_N: NDArray[np.float32] = self._ranks.sum(self._forward_pass.tensor(values_N)).cpu().numpy()
        return of_all_ranks_N

    def forward_backward(self, batch: TrainBatch) -> float:
        """Add the gradient of the batch's value loss, and return that loss. Needs the columns of `with_advantages`."""
        weights_N = token_weights(batch, "token")
        total = torch.zeros((), dtype=torch.float64, device=self._model.device)
        for micro in self._forward_pass.micro_batches(batch):
            values_P = self._values(micro)
            earlier_P, returns_P, weights_P = (
                self._forward_pass.tensor(column_N[micro.tokens_P])
                for column_N in (batch.columns[VALUES], batch.columns[RETURNS], weights_N)
            )
            loss = value_loss(values_P, earlier_P, returns_P, weights_P, self._settings.algorithm.critic.value_clip)
            loss.backward()  # also without a token: other ranks wait for this one's part in the gradient
            total += loss.detach()
        return float(self._ranks.sum(total))

    def clip_gradient(self) -> float:
        """Scale the gradient down to `algorithm.gradientClip` if its norm is larger; return the norm before that."""
        return self._optimizer.clip_gradient()

    def update(self, step: int) -> None:
        """Make the update after `step` steps, and clear the gradient."""
        self._optimizer.update(learning_rate(step, self._algorithm, self._settings.total_steps))

    def clear_gradients(self) -> None:
        """Drop the accumulated gradient."""
        self._optimizer.clear_gradients()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs: weights and optimizer."""
        weights = {f"{_PREFIX}weight.{name}": each.detach() for name, each in self._model.named_parameters()}
        return weights | {f"{_PREFIX}{name}": tensor for name, tensor in self._optimizer.tensors().items()}

    def check_saved(self, saved: SavedTensors) -> None:
        """Raise FailedPreconditionError if a checkpoint has no critic, or that of another model."""
        if not any(name.startswith(_PREFIX) for name in saved):
            raise FailedPreconditionError(
                f"checkpoint {saved.origin}: it has no critic, so algorithm.type ppo cannot continue it; to begin with "
                "its weights and a new critic, start another run with its folder as model.path (of an adapter: "
                "model.lora.initialAdapter)"
            )
        for name, weight in self._model.named_parameters():
            saved.check(f"{_PREFIX}weight.{name}", weight)

    def load_tensors(self, saved: SavedTensors) -> None:
        """Load what `tensors` returned on any number of ranks, which `check_saved` has accepted."""
        own = saved.below(_PREFIX)
        for name, weight in self._model.named_parameters():
            own.fill(f"weight.{name}", weight.detach())
        self._optimizer.load_tensors(own)

    def _values(self, micro: MicroBatch) -> Tensor:
        def finish(head: Head) -> Tensor:
            assert isinstance(head.module, nn.Linear)
            return linear(head.hidden_PH, head.module.weight, head.module.bias).squeeze(-1)

        return self._forward_pass.run(micro, finish)


def value_loss(
    values_P: Tensor, earlier_P: Tensor, returns_P: Tensor, weights_P: Tensor, value_clip: float | None
) -> Tensor:
    """sum w * 1/2 max((V - R)^2, (V_clipped - R)^2), V_clipped within `value_clip` of the step's first value.

    Source: the value clip of PPO's reference implementation (OpenAI baselines), as in verl and TRL. None: no clip.
    """
    squares_P = (values_P - returns_P).square()
    if value_clip is not None:
        clipped_P = earlier_P + (values_P - earlier_P).clamp(-value_clip, value_clip)
        squares_P = torch.maximum(squares_P, (clipped_P - returns_P).square())
    return (weights_P * squares_P).sum() / 2
