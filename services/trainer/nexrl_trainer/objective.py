"""What a step minimises: the policy loss that the experiment names, the entropy bonus and the KL penalty.

Suffix: _T trained tokens, flat. All terms use the weights of the loss, so with aggregation "sequence" bonus and penalty
are means over sequences of each one's token mean.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nexrl.algorithm import LossInputs, LossOutputs
from nexrl.code_reference import USER_CODE_ERRORS, load_reference, refused_arguments
from nexrl.errors import InvalidArgumentError, TrainingFailedError
from nexrl.exception_text import exception_text
from nexrl.spec.algorithm import AlgorithmSpec, OwnLoss
from nexrl_trainer.coefficients import Coefficients
from nexrl_trainer.correction import left_out
from nexrl_trainer.losses import LOSSES, MAX_LOG_RATIO, log_ratio
from nexrl_trainer.preference import PREFERENCE_LOSSES
from nexrl_trainer.ranks import Ranks

PolicyLoss: TypeAlias = Callable[[LossInputs], LossOutputs]


@dataclass(frozen=True)
class ObjectiveTerms:
    """What a step minimises, a scalar to call backward on, and its terms per token for metrics. Shape [T]."""

    objective: Tensor
    entropy_T: Tensor
    kl_T: Tensor
    clipped_T: Tensor
    left_out_T: Tensor


class Objective:
    """Policy loss - entropyCoefficient * sum w * entropy + klCoefficient * sum w * KL(policy || initial model).

    `coefficients` are those of the current step.
    """

    def __init__(self, algorithm: AlgorithmSpec, folder: Path) -> None:
        self.algorithm = algorithm
        self.coefficients = Coefficients(algorithm)
        self._policy_loss = policy_loss(algorithm, folder)

    def __call__(self, inputs: LossInputs, entropy_T: Tensor, reference_logprobs_T: Tensor | None) -> ObjectiveTerms:
        """Return the terms of these tokens. Without reference log-probabilities there is no KL term."""
        left_out_T = left_out(inputs, self.algorithm.correction)
        if left_out_T is not None:
            inputs = replace(inputs, weights_T=inputs.weights_T.masked_fill(left_out_T, 0))
        objective = (outputs := self._policy_loss(inputs)).loss
        if self.coefficients.entropy:
            objective = objective - self.coefficients.entropy * (inputs.weights_T * entropy_T).sum()
        kl_T = torch.zeros_like(entropy_T)
        if reference_logprobs_T is not None:
            kl_T = kl_penalty(inputs, reference_logprobs_T, self.algorithm)
            objective = objective + self.coefficients.kl * (inputs.weights_T * kl_T).sum()
        none_T = torch.zeros_like(outputs.clipped_T)
        return ObjectiveTerms(
            objective, entropy_T, kl_T, outputs.clipped_T, none_T if left_out_T is None else left_out_T
        )

    def check_step(self, loss: float, ranks: Ranks) -> None:
        """Check the end of a step, whose loss was `loss` on all `ranks` together. They all raise, or none does.

        Raises TrainingFailedError if the loss was NaN or infinite, or the gradient of a user's loss was,
        InvalidArgumentError if a user's loss had no gradient in any micro-batch.
        """
        if isinstance(self._policy_loss, _UserLoss):
            self._policy_loss.check_step(loss, ranks)
        _check_finite(self.algorithm.loss, loss)


def policy_loss(algorithm: AlgorithmSpec, folder: Path) -> PolicyLoss:
    """Return the loss that `algorithm.loss` names, with its keyword arguments; user code is looked up in `folder`.

    Raises InvalidArgumentError if user code cannot be loaded.
    """
    if isinstance(algorithm, OwnLoss):
        return _UserLoss(algorithm.loss, folder, algorithm.loss_config)
    loss = {**LOSSES, **PREFERENCE_LOSSES}[algorithm.loss]
    keywords = [name for name, p in inspect.signature(loss).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return partial(loss, **{name: getattr(algorithm, name) for name in keywords})


def reference_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """k3 = exp(d) - d - 1 with d = log p_reference - log p: unbiased for KL(p || reference), never negative.

    Source: J. Schulman, "Approximating KL divergence" (2020). Shape [T].
    """
    difference_T = log_ratio(reference_logprobs_T, logprobs_T)
    return torch.expm1(difference_T) - difference_T


def kl_penalty(inputs: LossInputs, reference_logprobs_T: Tensor, algorithm: AlgorithmSpec) -> Tensor:
    """Return the KL estimate that `algorithm.kl_estimator` names. Shape [T].

    "k2": d**2 / 2, biased; its gradient is that of the KL divergence, for samples of the policy itself.
    "k3": the value is unbiased for samples of the policy itself, the gradient is not that of the KL divergence.
    "k3_unbiased": r * k3 with r = p / p_rollout; value and gradient are unbiased, for samples of an older policy too
    (DeepSeek-V3.2, arXiv 2512.02556; TRL's default).
    """
    match algorithm.kl_estimator:
        case "k2":
            return log_ratio(inputs.logprobs_T, reference_logprobs_T).square() / 2
        case "k3":
            return reference_kl(inputs.logprobs_T, reference_logprobs_T)
        case "k3_unbiased":
            ratio_T = log_ratio(inputs.logprobs_T, inputs.rollout_logprobs_T).exp()
            return ratio_T * reference_kl(inputs.logprobs_T, reference_logprobs_T)


class _UserLoss:
    """A loss of the user: what it returns and its gradient are checked, and errors name its reference."""

    def __init__(self, reference: str, folder: Path, config: Mapping[str, Any]) -> None:
        loss = load_reference(reference, folder)
        if not callable(loss):
            raise InvalidArgumentError(f"algorithm.loss {reference}: not a function but {type(loss).__name__}")
        if problem := refused_arguments(loss, ["inputs"], config):
            raise InvalidArgumentError(f"algorithm.lossConfig: {reference} does not accept it: {problem}")
        self._reference, self._loss, self._config = reference, loss, config
        self._calls = 0
        self._are_gradients_finite: list[Tensor] = []

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        own_T = inputs.logprobs_T.view_as(inputs.logprobs_T)
        own_T.register_hook(self._note_gradient)
        try:
            outputs = self._loss(replace(inputs, logprobs_T=own_T), **self._config)
        except USER_CODE_ERRORS as error:
            self._calls, self._are_gradients_finite = 0, []
            raise TrainingFailedError(f"algorithm.loss {self._reference}: {exception_text(error)}") from error
        if fault := _fault(outputs, inputs):
            raise InvalidArgumentError(f"algorithm.loss {self._reference}: {fault}")
        self._calls += 1
        if outputs.loss.requires_grad:
            return outputs  # type: ignore[no-any-return]  # as _fault has found
        # No token of this micro-batch may matter to the loss. `backward` needs a graph; the empty sum adds only that.
        return LossOutputs(outputs.loss + inputs.logprobs_T[:0].sum(), outputs.clipped_T)

    def check_step(self, loss: float, ranks: Ranks) -> None:
        """Raise what `Objective.check_step` says. Forgets the step."""
        calls, self._calls = self._calls, 0
        are_finite, self._are_gradients_finite = self._are_gradients_finite, []
        finite = sum(map(int, torch.stack(are_finite).tolist())) if are_finite else 0
        counts = torch.tensor([calls, len(are_finite), finite], device=ranks.device)
        calls, gradients, finite = ranks.sum(counts).tolist()
        if calls and not gradients:
            raise InvalidArgumentError(
                f"algorithm.loss {self._reference}: loss does not depend on logprobs_T in any micro-batch of the step, "
                "so it has no gradient"
            )
        _check_finite(self._reference, loss)
        if finite < gradients:
            raise TrainingFailedError(
                f"algorithm.loss {self._reference}: its gradient by logprobs_T is not finite; clamp log ratios before "
                f"exp, as built-in losses do at {MAX_LOG_RATIO:g}"
            )

    def _note_gradient(self, gradient_T: Tensor) -> None:
        # Read at the end of the step: reading a value back for each micro-batch would stall a GPU.
        self._are_gradients_finite.append(torch.isfinite(gradient_T).all())


def _check_finite(name: str, loss: float) -> None:
    if not math.isfinite(loss):
        raise TrainingFailedError(f"algorithm.loss {name}: the loss of the step is {loss}")


def _fault(outputs: object, inputs: LossInputs) -> str:
    """Return what is wrong with what a user's loss returned; empty if nothing is. Reads no value back from a GPU."""
    if not isinstance(outputs, LossOutputs):
        return f"returned {type(outputs).__name__}; a nexrl.algorithm.LossOutputs is needed"
    wanted: Sequence[tuple[str, object, tuple[int, ...], torch.dtype]] = (
        ("loss", outputs.loss, (), inputs.logprobs_T.dtype),
        ("clipped_T", outputs.clipped_T, inputs.logprobs_T.shape, torch.bool),
    )
    for name, tensor, shape, dtype in wanted:
        if not isinstance(tensor, Tensor):
            return f"{name} is {type(tensor).__name__}; a tensor is needed"
        if tensor.shape != shape or tensor.dtype != dtype:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}; {dtype} {list(shape)} is needed"
    return ""
