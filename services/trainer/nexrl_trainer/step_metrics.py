"""Figures of a training step: of each loss, of each update, and of the whole.

Suffix: _P trained tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

import numpy as np
import torch

from nexrl.algorithm import LossInputs
from nexrl.train_batch import TrainBatch
from nexrl_trainer.coefficients import Coefficients
from nexrl_trainer.losses import log_ratio
from nexrl_trainer.objective import ObjectiveTerms
from nexrl_trainer.ranks import Ranks

_MEANS = ("entropy", "reference_kl", "ratio_mean", "mismatch_kl", "clip_fraction", "left_out_fraction")
_OVER_TOKENS = (*_MEANS, "ratio_min", "ratio_max", "value_loss")


@dataclass(frozen=True)
class LossMetrics:
    """Figures of one forward-backward. All but `loss` are means (or bounds) over the `token_count` trained tokens.

    A ratio is the trainer's probability divided by the one that the rollout recorded. `mismatch_kl` is the k3 estimate
    of KL(rollout || trainer). `left_out_fraction` is the share of tokens that `algorithm.correction` left out.
    """

    loss: float
    entropy: float
    reference_kl: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    mismatch_kl: float
    clip_fraction: float
    left_out_fraction: float
    token_count: int
    sequence_count: int
    value_loss: float | None = field(default=None, kw_only=True)
    """That of the critic, if there is one."""


@dataclass(frozen=True)
class OptimizerMetrics:
    """Figures of one update. `step` counts updates, this one included; `grad_norm` is the norm before clipping."""

    step: int
    lr: float
    grad_norm: float
    critic_grad_norm: float | None = field(default=None, kw_only=True)
    """That of the critic, if there is one."""


@dataclass(frozen=True)
class StepMetrics(LossMetrics, OptimizerMetrics):
    """Figures of one whole step: over all its updates. `grad_norm` is their mean.

    From the second update on, ratios and `mismatch_kl` also contain what the updates before have changed.
    `token_count` are the trained tokens of an epoch, without those of skipped updates.

    An update whose loss or gradient is not finite is skipped. It counts in `skipped_updates` only.

    `kl_coefficient` and `entropy_coefficient` are those of this step.
    """

    updates: int = 1
    skipped_updates: int = 0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    return_mean: float | None = None
    value_mean: float | None = None
    explained_variance: float | None = None
    """Of the critic at the start of the step, if there is one: `gae.ValueFigures`."""

    def figures(self) -> dict[str, float]:
        """Return the figures by name. Means over tokens are left out if no token was trained."""
        left_out = () if self.token_count else _OVER_TOKENS
        return {name: value for name, value in known(self).items() if name not in left_out}


def known(metrics: LossMetrics | OptimizerMetrics) -> dict[str, float]:
    """Return the figures by name, without those of a critic that is not there."""
    return {name: value for name, value in asdict(metrics).items() if value is not None}


class LossTotals:
    """Sums over micro-batches. They stay on the model's device until the end: reading each back would stall a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        self._bounds = torch.full((2,), -torch.inf, device=device)
        """The largest of -ratio and ratio."""

    def add(self, inputs: LossInputs, terms: ObjectiveTerms) -> None:
        with torch.no_grad():
            difference_P = log_ratio(inputs.logprobs_T, inputs.rollout_logprobs_T)
            ratio_P = difference_P.exp()
            mismatch_P = torch.expm1(difference_P) - difference_P
            marks = (terms.clipped_T.float(), terms.left_out_T.float())
            columns = (terms.entropy_T, terms.kl_T, ratio_P, mismatch_P, *marks)
            self._sums += torch.stack([terms.objective, *(column.sum() for column in columns)])
            self._bounds = self._bounds.maximum(torch.stack([-ratio_P.min(), ratio_P.max()]))

    def metrics(self, batch: TrainBatch, ranks: Ranks) -> LossMetrics:
        """Return the figures of the whole batch, of which each rank has added up its share."""
        sequences, tokens = len(batch.lengths_B), batch.token_count
        if not tokens:
            return no_loss(sequences)
        loss, *sums = ranks.sum(self._sums).tolist()
        entropy, kl, ratio, mismatch, clipped, left_out = (total / tokens for total in sums)
        negative_ratio_min, ratio_max = ranks.maximum(self._bounds).tolist()
        return LossMetrics(
            loss=loss,
            entropy=entropy,
            reference_kl=kl,
            ratio_mean=ratio,
            ratio_min=-negative_ratio_min,
            ratio_max=ratio_max,
            mismatch_kl=mismatch,
            clip_fraction=clipped,
            left_out_fraction=left_out,
            token_count=tokens,
            sequence_count=sequences,
        )


def step_metrics(
    batch: TrainBatch,
    made: Sequence[tuple[LossMetrics, OptimizerMetrics]],
    skipped: int,
    epochs: int,
    coefficients: Coefficients,
) -> StepMetrics:
    """Return the figures of a step of these updates. An update that was skipped counts in `skipped` only.

    `coefficients` are those of the step.
    """
    losses, updates = zip(*made, strict=True)
    tokens = np.array([max(loss.token_count, 1) for loss in losses])
    shares = tokens / tokens.sum()  # exactly 1 for a single update
    means = {name: float(shares @ [getattr(loss, name) for loss in losses]) for name in (*_MEANS, "loss")}
    return StepMetrics(
        **means,
        ratio_min=min(loss.ratio_min for loss in losses),
        ratio_max=max(loss.ratio_max for loss in losses),
        token_count=round(sum(loss.token_count for loss in losses) / epochs),
        sequence_count=len(batch.lengths_B),
        step=updates[-1].step,
        lr=updates[-1].lr,
        grad_norm=fmean(update.grad_norm for update in updates),
        updates=len(updates),
        skipped_updates=skipped,
        value_loss=None if losses[0].value_loss is None else float(shares @ [loss.value_loss for loss in losses]),
        critic_grad_norm=None if updates[0].critic_grad_norm is None else fmean(u.critic_grad_norm for u in updates),
        kl_coefficient=coefficients.kl,
        entropy_coefficient=coefficients.entropy,
    )


def no_loss(sequence_count: int) -> LossMetrics:
    """Return the figures of a batch without a trained token."""
    return LossMetrics(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0, sequence_count)
