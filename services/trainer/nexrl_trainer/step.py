"""One optimizer step: model, AdamW and schedule behind four verbs (forward, forward_backward, optimizer_step, train).

Suffixes: _N tokens of a batch, _P trained tokens of a micro-batch, _V vocabulary, _B _T rows and input positions, _H
hidden size.
Runs are repeatable bit for bit on a CPU with a fixed number of threads: nothing here draws a random number.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, TrainingFailedError
from nexrl.spec.experiment import AlgorithmSpec
from nexrl_trainer.batching import TrainBatch, token_weights
from nexrl_trainer.losses import (
    LossInputs,
    LossOutputs,
    cispo_loss,
    clipped_policy_loss,
    reference_kl,
    reinforce_loss,
    token_entropy,
)
from nexrl_trainer.micro_batch import SHARED_ROW_TOKENS, MicroBatch, split_batch

_OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")
_OVER_TOKENS = ("entropy", "reference_kl", "ratio_mean", "ratio_min", "ratio_max", "mismatch_kl", "clip_fraction")


@dataclass(frozen=True)
class LearnerSettings:
    """What a learner needs to know besides the model.

    `total_steps` ends the learning rate's decay. `temperature` must be the one that the tokens were sampled at.
    `max_tokens_per_micro_batch` bounds memory; the result does not depend on it.
    """

    algorithm: AlgorithmSpec
    total_steps: int
    temperature: float = 1.0
    max_tokens_per_micro_batch: int = 8192


@dataclass(frozen=True)
class LossMetrics:
    """What a forward-backward saw; all but `loss` are plain means (or bounds) over the `token_count` trained tokens.

    Ratio: the trainer's probability over the one recorded by the rollout. `mismatch_kl`: k3 estimate of
    KL(rollout || trainer).
    """

    loss: float
    entropy: float
    reference_kl: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    mismatch_kl: float
    clip_fraction: float
    token_count: int
    sequence_count: int


@dataclass(frozen=True)
class OptimizerMetrics:
    """What an optimizer step did. `step` counts updates, this one included; `grad_norm` is the norm before clipping."""

    step: int
    lr: float
    grad_norm: float


@dataclass(frozen=True)
class StepMetrics(LossMetrics, OptimizerMetrics):
    """One whole step."""

    def figures(self) -> dict[str, float]:
        """By name; where no token was trained, without the means over tokens."""
        without = () if self.token_count else _OVER_TOKENS
        return {name: value for name, value in asdict(self).items() if name not in without}


def learning_rate(step: int, algorithm: AlgorithmSpec, total_steps: int) -> float:
    """The rate of the update that follows `step` updates: linearly up in the warm-up, then linearly down to the end."""
    if step < algorithm.warmup_steps:
        return algorithm.learning_rate * (step + 1) / algorithm.warmup_steps
    decay_steps = max(total_steps - algorithm.warmup_steps, 1)
    done_ratio = min((step - algorithm.warmup_steps) / decay_steps, 1.0)
    return algorithm.learning_rate * (1.0 - (1.0 - algorithm.final_learning_rate_ratio) * done_ratio)


class Learner:
    """Holds the model and its optimizer; `step` is the number of updates done, which is the policy version it holds."""

    def __init__(self, model: PreTrainedModel, settings: LearnerSettings) -> None:
        _check(model, settings)
        self.model = model
        self.settings = settings
        self.step = 0
        # Dropout would train another policy than the one that sampled.
        model.eval()
        self._masters = {name: _master(parameter) for name, parameter in model.named_parameters()}
        beta1, beta2 = settings.algorithm.betas
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            betas=(beta1, beta2),
            weight_decay=settings.algorithm.weight_decay,
            fused=True,
        )

    def train(self, batch: TrainBatch) -> StepMetrics:
        """One step on one batch. A batch with nothing to train changes no weight, and still counts as a step."""
        loss = self.forward_backward(batch)
        return StepMetrics(**asdict(self.optimizer_step()), **asdict(loss))

    def forward(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Log-probabilities of the trained tokens under the current weights, 0 elsewhere. Shape [N]."""
        logprobs_N = np.zeros(len(batch.token_ids_N), np.float32)
        with torch.inference_mode():
            for micro in self._micro_batches(batch):
                logprobs_PV = self._logprobs(micro)
                logprobs_N[micro.tokens_P] = _chosen(logprobs_PV, self._tensor(batch.token_ids_N[micro.tokens_P])).cpu()
        return logprobs_N

    def forward_backward(
        self, batch: TrainBatch, algorithm: AlgorithmSpec | None = None, *, denominator: int | None = None
    ) -> LossMetrics:
        """Add the gradient of the batch's loss to what is there.

        `algorithm` stands in for the settings' own loss. `denominator` as in `token_weights`: give it when the step has
        several batches. Raises InvalidArgumentError if the loss needs reference log-probabilities and has none.
        """
        algorithm = algorithm or self.settings.algorithm
        if algorithm.kl_coefficient and batch.reference_logprobs_N is None:
            raise InvalidArgumentError("train batch: reference_logprobs_N: needed, since klCoefficient is not 0")
        weights_N = token_weights(batch, algorithm.aggregation, denominator)
        totals = _LossTotals()
        for micro in self._micro_batches(batch):
            self._backward(batch, micro, weights_N, algorithm, totals)
        return totals.metrics(sequence_count=len(batch.lengths_B))

    def optimizer_step(self) -> OptimizerMetrics:
        """Clip the accumulated gradient, update the weights, clear the gradient.

        Raises TrainingFailedError if the gradient is not finite, since such an update would destroy the weights; the
        gradient is cleared then too.
        """
        self._move_gradients_to_masters()
        algorithm = self.settings.algorithm
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), algorithm.gradient_clip))
        if not np.isfinite(grad_norm):
            self._clear_gradients()
            raise TrainingFailedError(f"step {self.step + 1}: gradient norm is {grad_norm}")
        lr = learning_rate(self.step, algorithm, self.settings.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._clear_gradients()
        self._copy_masters_to_model()
        self.step += 1
        return OptimizerMetrics(step=self.step, lr=lr, grad_norm=grad_norm)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by `<quantity>.<parameter name>`; no moments before the first update."""
        parameters = dict(self.model.named_parameters())
        tensors = {f"master.{name}": m.detach() for name, m in self._masters.items() if m is not parameters[name]}
        for name, master in self._masters.items():
            tensors |= {f"{quantity}.{name}": tensor for quantity, tensor in self._optimizer.state[master].items()}
        return tensors

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `optimizer_tensors` gave, after the model's weights. Gradients not yet applied are dropped."""
        self._clear_gradients()
        self._optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            master = self._masters[name]
            if master is not parameter:
                master.detach().copy_(tensors.get(f"master.{name}", parameter.detach()))
            if f"step.{name}" in tensors:
                saved = {quantity: tensors[f"{quantity}.{name}"] for quantity in _OPTIMIZER_STATE}
                self._optimizer.state[master] = {key: tensor.clone().to(master.device) for key, tensor in saved.items()}

    def _micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        # A mask of our own would overrule a model's sliding window.
        shared_row_tokens = 0 if getattr(self.model.config, "sliding_window", None) else SHARED_ROW_TOKENS
        return split_batch(batch, self.settings.max_tokens_per_micro_batch, shared_row_tokens)

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probabilities [P, V], float32, only where a trained token is predicted: the head is costly."""
        hidden_BTH = self.model.base_model(
            input_ids=self._tensor(micro.input_ids_BT),
            position_ids=self._tensor(micro.position_ids_BT),
            attention_mask=self._attention_mask(micro),
            use_cache=False,
        ).last_hidden_state
        hidden_PH = hidden_BTH.flatten(0, 1).index_select(0, self._tensor(micro.positions_P))
        head = self.model.get_output_embeddings()
        bias_V = None if head.bias is None else head.bias.float()
        logits_PV = functional.linear(hidden_PH.float(), head.weight.float(), bias_V)
        return functional.log_softmax(logits_PV / self.settings.temperature, dim=-1)

    def _attention_mask(self, micro: MicroBatch) -> Tensor | None:
        """True where column i may look at column j, [B, 1, T, T]; None where plain causal attention says so."""
        if not micro.is_shared:
            return None
        segments_BT = self._tensor(micro.segments_BT)
        is_own_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
        is_seen_BTT = is_own_BTT | (segments_BT[:, None, :] == 0)
        return is_seen_BTT.tril()[:, None]

    def _backward(
        self,
        batch: TrainBatch,
        micro: MicroBatch,
        weights_N: NDArray[np.float32],
        algorithm: AlgorithmSpec,
        totals: "_LossTotals",
    ) -> None:
        logprobs_PV = self._logprobs(micro)
        inputs = LossInputs(
            logprobs_T=_chosen(logprobs_PV, self._tensor(batch.token_ids_N[micro.tokens_P])),
            rollout_logprobs_T=self._tensor(batch.rollout_logprobs_N[micro.tokens_P]),
            advantages_T=self._tensor(batch.advantages_N[micro.tokens_P]),
            weights_T=self._tensor(weights_N[micro.tokens_P]),
        )
        outputs = _policy_loss(inputs, algorithm)
        with torch.set_grad_enabled(algorithm.entropy_coefficient != 0):
            entropy_P = token_entropy(logprobs_PV)
        objective = outputs.loss - algorithm.entropy_coefficient * (inputs.weights_T * entropy_P).sum()
        kl_P = torch.zeros_like(entropy_P)
        if batch.reference_logprobs_N is not None:
            kl_P = reference_kl(inputs.logprobs_T, self._tensor(batch.reference_logprobs_N[micro.tokens_P]))
            objective = objective + algorithm.kl_coefficient * (inputs.weights_T * kl_P).sum()
        objective.backward()
        totals.add(inputs, objective, entropy_P, kl_P, outputs.clipped_T)

    def _clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self._optimizer.zero_grad(set_to_none=True)

    def _move_gradients_to_masters(self) -> None:
        for name, parameter in self.model.named_parameters():
            master = self._masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def _copy_masters_to_model(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)


class MockLearner(Learner):
    """trainer.backend mock: counts steps and changes no weight, for trying the machinery around training."""

    def forward_backward(
        self, batch: TrainBatch, algorithm: AlgorithmSpec | None = None, *, denominator: int | None = None
    ) -> LossMetrics:
        return _LossTotals().metrics(sequence_count=len(batch.lengths_B))

    def optimizer_step(self) -> OptimizerMetrics:
        self.step += 1
        return OptimizerMetrics(step=self.step, lr=0.0, grad_norm=0.0)


class _LossTotals:
    """Sums over micro-batches, on the model's device until the end: a read-back per micro-batch would stall a GPU."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums: list[Tensor] = []
        self._bounds: list[Tensor] = []

    def add(self, inputs: LossInputs, objective: Tensor, entropy_P: Tensor, kl_P: Tensor, clipped_P: Tensor) -> None:
        with torch.no_grad():
            difference_P = inputs.logprobs_T - inputs.rollout_logprobs_T
            ratio_P = difference_P.exp()
            self._tokens += len(ratio_P)
            columns = (entropy_P, kl_P, ratio_P, torch.expm1(difference_P) - difference_P, clipped_P.float())
            self._sums.append(torch.stack([objective, *(column.sum() for column in columns)]).double())
            self._bounds.append(torch.stack([ratio_P.min(), ratio_P.max()]))

    def metrics(self, sequence_count: int) -> LossMetrics:
        if not self._sums:
            return LossMetrics(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0, sequence_count)
        loss, *sums = torch.stack(self._sums).sum(0).tolist()
        entropy, kl, ratio, mismatch, clipped = (total / self._tokens for total in sums)
        bounds = torch.stack(self._bounds)
        return LossMetrics(
            loss=loss,
            entropy=entropy,
            reference_kl=kl,
            ratio_mean=ratio,
            ratio_min=float(bounds[:, 0].min()),
            ratio_max=float(bounds[:, 1].max()),
            mismatch_kl=mismatch,
            clip_fraction=clipped,
            token_count=self._tokens,
            sequence_count=sequence_count,
        )


def _policy_loss(inputs: LossInputs, algorithm: AlgorithmSpec) -> LossOutputs:
    match algorithm.loss:
        case "ppo_clip":
            return clipped_policy_loss(inputs, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
        case "cispo":
            return cispo_loss(inputs, max_ratio=1 + algorithm.clip_high)
        case "reinforce":
            return reinforce_loss(inputs)


def _master(parameter: Tensor) -> Tensor:
    """What the optimizer updates: a float32 copy of 16-bit weights, in which most updates would round to nothing."""
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()


def _chosen(logprobs_PV: Tensor, token_ids_P: Tensor) -> Tensor:
    return logprobs_PV.gather(-1, token_ids_P.unsqueeze(-1)).squeeze(-1)


def _check(model: PreTrainedModel, settings: LearnerSettings) -> None:
    if settings.temperature <= 0:
        raise InvalidArgumentError(f"temperature is {settings.temperature}; must be positive")
    for attribute in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        # The head is applied here, to chosen positions only: what a model does to its logits afterwards would be lost.
        if getattr(model.config, attribute, None):
            raise FailedPreconditionError(f"model.path: {model.config.model_type} with {attribute} is not supported")
