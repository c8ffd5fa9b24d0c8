"""The weights of the KL penalty and of the entropy bonus: fixed, or moved after each step towards a target."""

from typing import Protocol

import torch
from torch import Tensor

from nexrl.spec.algorithm import MAX_ENTROPY_COEFFICIENT, MAX_KL_COEFFICIENT, AlgorithmSpec
from nexrl_trainer.tensor_slices import SavedTensors

KL_ERROR_LIMIT = 0.2
KL_GAIN = 0.1
"""Error limit and gain of arXiv 1909.08593, section 2.2: a step changes the coefficient by at most 2 %."""
ENTROPY_CHANGE = 0.005
"""Change of the entropy coefficient in a step, of arXiv 2505.22312."""


class Measured(Protocol):
    """Means over the `token_count` tokens of a forward-backward."""

    @property
    def reference_kl(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def token_count(self) -> int: ...


class Coefficients:
    """The coefficients of one step. Figures of its updates decide those of the next.

    With `algorithm.kl_target`, the controller of arXiv 1909.08593 (equation for beta in section 2.2): with e the KL
    penalty's distance from the target as a share of it, within ±KL_ERROR_LIMIT, `kl` is multiplied by 1 + KL_GAIN * e.
    With `algorithm.entropy_target`, that of Skywork-OR1 (arXiv 2505.22312): a level rises by ENTROPY_CHANGE after a
    step with less entropy and falls after one with more; `entropy` is the level if the entropy was at most the target,
    otherwise 0. Both stay within the limits of their keys.
    """

    def __init__(self, algorithm: AlgorithmSpec) -> None:
        self.kl = algorithm.kl_coefficient
        self.entropy = algorithm.entropy_coefficient
        self._entropy_level = algorithm.entropy_coefficient
        self._algorithm = algorithm
        self._observed: list[Measured] = []
        self._kept: list[Measured] = []

    def observe(self, measured: Measured) -> None:
        """Note the figures of a forward-backward, until its update is made (`keep`) or not (`drop`)."""
        self._observed.append(measured)

    def keep(self) -> None:
        """Count what was observed: the update is made."""
        self._kept += self._observed
        self.drop()

    def drop(self) -> None:
        """Forget what was observed and not kept."""
        self._observed = []

    def end_step(self) -> None:
        """Choose the coefficients of the next step. Without a trained token they stay."""
        kept, self._kept = self._kept, []
        tokens = sum(each.token_count for each in kept)
        if tokens and self._algorithm.kl_target is not None:
            kl = sum(each.reference_kl * each.token_count for each in kept) / tokens
            self.kl = next_kl_coefficient(self.kl, kl, self._algorithm.kl_target)
        if tokens and self._algorithm.entropy_target is not None:
            entropy = sum(each.entropy * each.token_count for each in kept) / tokens
            self._entropy_level = next_entropy_level(self._entropy_level, entropy, self._algorithm.entropy_target)
            self.entropy = self._entropy_level if entropy <= self._algorithm.entropy_target else 0.0

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs, float64: nothing if the coefficients are fixed."""
        tensors = {}
        if self._algorithm.kl_target is not None:
            tensors["coefficient.kl"] = torch.tensor(self.kl, dtype=torch.float64)
        if self._algorithm.entropy_target is not None:
            levels = [self.entropy, self._entropy_level]
            tensors["coefficient.entropy"] = torch.tensor(levels, dtype=torch.float64)
        return tensors

    def load_tensors(self, saved: SavedTensors) -> None:
        """Load what `tensors` returned. A coefficient that was fixed then begins anew."""
        self._observed, self._kept = [], []
        initial = Coefficients(self._algorithm)
        self.kl, self.entropy, self._entropy_level = initial.kl, initial.entropy, initial._entropy_level
        tensors = self.tensors()
        for name in tensors.keys() & saved.keys():
            saved.fill(name, tensors[name])
        if "coefficient.kl" in tensors:
            self.kl = float(tensors["coefficient.kl"])
        if "coefficient.entropy" in tensors:
            self.entropy, self._entropy_level = tensors["coefficient.entropy"].tolist()


def next_kl_coefficient(coefficient: float, kl: float, target: float) -> float:
    """Return the coefficient after a step with this KL penalty per token."""
    error = min(max(kl / target - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    return min(coefficient * (1 + KL_GAIN * error), MAX_KL_COEFFICIENT)


def next_entropy_level(level: float, entropy: float, target: float) -> float:
    """Return the level after a step with this entropy per token, in nats."""
    if entropy == target:
        return level
    change = ENTROPY_CHANGE if entropy < target else -ENTROPY_CHANGE
    return min(max(level + change, 0.0), MAX_ENTROPY_COEFFICIENT)
