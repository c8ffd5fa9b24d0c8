"""One optimizer step: forward pass, loss and optimizer behind four verbs (forward, forward_backward, optimizer_step,
train).

Suffixes: _N tokens of a batch, _P trained tokens of a micro-batch, _B sequences.
Training repeats bit for bit on a CPU with a fixed number of threads, and on a GPU with `trainer.deterministic`: nothing
here draws a random number.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nexrl.algorithm import LossInputs
from nexrl.columns import Columns
from nexrl.critic_columns import VALUES, check_critic_columns
from nexrl.errors import InvalidArgumentError, TrainingFailedError
from nexrl.spec.algorithm import AlgorithmSpec, ConstantAggregation, Dpo
from nexrl.spec.critic import Ppo
from nexrl.train_batch import TrainBatch
from nexrl.weights.packing import Snapshot, snapshot
from nexrl_trainer.batching import token_weights
from nexrl_trainer.critic import Critic, CriticSettings
from nexrl_trainer.forward import ForwardPass, ForwardSettings
from nexrl_trainer.gae import ValueFigures, with_advantages
from nexrl_trainer.held_state import HeldState, name_at, random_states
from nexrl_trainer.host_copy import HostCopies
from nexrl_trainer.layers import LayerSettings, set_up_layers
from nexrl_trainer.losses import PROXIMAL, PROXIMAL_LOSSES
from nexrl_trainer.micro_batch import MicroBatch
from nexrl_trainer.moving_reference import MovingReference
from nexrl_trainer.objective import Objective
from nexrl_trainer.optimizer import MasterOptimizer, learning_rate
from nexrl_trainer.preference import check_pairs, with_preferences
from nexrl_trainer.ranks import ONE_RANK, Ranks
from nexrl_trainer.step_metrics import LossMetrics, LossTotals, OptimizerMetrics, StepMetrics, no_loss, step_metrics
from nexrl_trainer.tensor_slices import SavedTensors, own_slice
from nexrl_trainer.trained_weights import Adapter, AdapterSettings, TrainedWeights, WholeModel

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class LearnerSettings:
    """What a learner needs to know besides the model.

    The learning rate ends its fall at update `total_steps`. A loss of the user is looked up in `folder`. With
    `adapter`, an adapter is trained instead of the weights.
    """

    algorithm: AlgorithmSpec
    total_steps: int
    forward: ForwardSettings = field(default_factory=ForwardSettings)
    folder: Path = Path()
    layers: LayerSettings = field(default_factory=LayerSettings)
    adapter: AdapterSettings | None = None


class Learner:
    """Trains a model. `step` is the number of updates done, which is the version of the policy that it holds.

    `forward_pass`, `trained` and `optimizer` work on the same model.

    Of several `ranks`, each has a learner, built of the same model, and calls the same methods with the same batches.
    They return the same on all ranks, and what they would return on a single rank, up to rounding. If a method raises
    on one rank only, as in code of the user, the other ranks may wait for that rank: end their processes, too. See
    `leader.py`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings,
        ranks: Ranks = ONE_RANK,
        critic_model: Callable[[], PreTrainedModel] | None = None,
    ) -> None:
        """`critic_model` builds the model of the critic, which algorithm type ppo has, with its value head."""
        self.model = model
        self.settings = settings
        self.step = 0
        self.is_between_steps = True
        """False while only some of a step's updates are made. Such weights are no version of the policy."""
        self.ranks = ranks
        self.forward_pass = ForwardPass(model, settings.forward, ranks=ranks)
        self.adapter = Adapter(model, settings.adapter) if settings.adapter else None
        self.trained: TrainedWeights = self.adapter or WholeModel(model)
        set_up_layers(model, settings.layers)
        ranks.shard(model)
        self.optimizer = MasterOptimizer(model, settings.algorithm)
        follows = settings.algorithm.reference
        self._moving_reference = None if follows is None else MovingReference(model, follows)
        # Built last: until the policy is sharded, there is no room for a second whole model.
        self.critic = None if critic_model is None else self._critic(critic_model())
        self._objective = Objective(settings.algorithm, settings.folder)
        self._held_weights, self._held_training = HostCopies(), HostCopies()
        self._held_states = 0

    def train(self, batch: TrainBatch) -> StepMetrics:
        """Train one step on one batch, with an update for each mini-batch of each epoch.

        A batch without trained tokens changes no weight and still counts as a step. Raises TrainingFailedError if
        each update would have failed: no weight has changed then, unless the user's loss raised (`is_between_steps`).
        """
        algorithm = self.settings.algorithm
        batch, of_critic = self._with_advantages(self._with_moving_reference(batch), self.values)
        made: list[tuple[LossMetrics, OptimizerMetrics]] = []
        failures: list[TrainingFailedError] = []
        for part in self._with_proximal(batch).parts(algorithm.mini_batches) * algorithm.epochs:
            try:
                made.append((self.forward_backward(part), self.update()))
                self.is_between_steps = False
            except TrainingFailedError as error:
                self.clear_gradients()  # what follows is trained on top of nothing
                if error.__cause__ is not None:
                    raise
                failures.append(error)
        if not made:
            raise failures[0]
        metrics = step_metrics(batch, made, len(failures), algorithm.epochs, self._objective.coefficients)
        metrics = replace(metrics, **asdict(of_critic)) if of_critic else metrics
        self.end_step()
        return metrics

    def forward(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-probabilities of the trained tokens under the current weights, 0 elsewhere. Shape [N]."""
        return self.forward_pass.logprobs(batch)

    def forward_reference(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-probabilities under the reference model that the learner has, 0 elsewhere. Shape [N].

        That is the base of the adapter, or the reference model that follows the policy.
        """
        if self.adapter:
            with self.adapter.off():
                return self.forward_pass.logprobs(batch)
        assert self._moving_reference is not None
        with self._moving_reference.in_place_of_policy():
            return self.forward_pass.logprobs(batch)

    def values(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the critic's value of the context of each trained token, 0 elsewhere. Shape [N]."""
        assert self.critic is not None
        return self.critic.values(batch)

    def forward_backward(
        self, batch: TrainBatch, algorithm: AlgorithmSpec | None = None, *, denominator: int | None = None
    ) -> LossMetrics:
        """Add the gradient of the batch's loss to the gradient accumulated so far.

        `algorithm` replaces the algorithm of the settings for this call. `denominator` is that of `token_weights`, and
        is required when the step has several batches. Raises InvalidArgumentError if the loss needs reference
        log-probabilities or pairs, or the critic rewards, and the batch has none; and for `algorithm` or `denominator`
        if there is a critic. Advantages come from the critic as it is, unless `train` has added them.
        """
        if self.critic and (algorithm is not None or denominator is not None):
            raise InvalidArgumentError("forward_backward: algorithm, denominator: not with algorithm.type ppo")
        objective = Objective(algorithm, self.settings.folder) if algorithm else self._objective
        algorithm = objective.algorithm
        _check_columns(batch, algorithm, is_prepared=True)
        if self.critic and VALUES not in batch.columns:
            batch, _ = self._with_advantages(batch, self.critic.values)
        if isinstance(algorithm, Dpo):
            if denominator is not None:
                raise InvalidArgumentError(
                    "forward_backward: denominator: loss dpo needs all pairs of a step in one batch"
                )
            batch = with_preferences(batch, self.forward_pass.logprobs(batch), algorithm)
        constant_tokens = algorithm.constant_tokens if isinstance(algorithm, ConstantAggregation) else None
        weights_N = token_weights(batch, algorithm.aggregation, denominator, constant_tokens=constant_tokens)
        totals = LossTotals(self.model.device)
        for micro in self.forward_pass.micro_batches(batch):
            self._backward(batch, micro, weights_N, objective, totals)
        metrics = totals.metrics(batch, self.ranks)
        objective.check_step(metrics.loss, self.ranks)
        if self.critic:
            metrics = replace(metrics, value_loss=self.critic.forward_backward(batch))
        objective.coefficients.observe(metrics)
        return metrics

    def optimizer_step(self) -> OptimizerMetrics:
        """End a step with one update. Raises what `update` raises."""
        metrics = self.update()
        self.end_step()
        return metrics

    def update(self) -> OptimizerMetrics:
        """Clip the accumulated gradient, update the weights, and clear the gradient. The step does not end.

        Raises TrainingFailedError if the gradient is not finite, because such an update would destroy the weights. The
        gradient is cleared then too.
        """
        algorithm = self.settings.algorithm
        grad_norm = self.optimizer.clip_gradient()
        critic_norm = self.critic.clip_gradient() if self.critic else None
        for owner, norm in (("", grad_norm), (" of the critic", critic_norm)):
            if norm is not None and not np.isfinite(norm):
                Learner.clear_gradients(self)  # not as a call of its own, which other ranks would get twice
                raise TrainingFailedError(f"step {self.step + 1}: gradient norm{owner} is {norm}")
        if self.critic:
            self.critic.update(self.step)
        first, lr = algorithm.critic_only_steps if isinstance(algorithm, Ppo) else 0, 0.0
        if self.step < first:
            Learner.clear_gradients(self)
        else:
            lr = learning_rate(self.step - first, algorithm, max(0, self.settings.total_steps - first))
            self.optimizer.update(lr)
            self._objective.coefficients.keep()
        return OptimizerMetrics(step=self.step + 1, lr=lr, grad_norm=grad_norm, critic_grad_norm=critic_norm)

    def end_step(self) -> None:
        """Count the step: its updates make the next version of the policy."""
        self._objective.coefficients.end_step()
        self.step += 1
        if self._moving_reference:
            self._moving_reference.follow(self.step)
        self.is_between_steps = True

    def clear_gradients(self) -> None:
        """Drop the accumulated gradient."""
        self._objective.coefficients.drop()
        self.optimizer.clear_gradients()
        if self.critic:
            self.critic.clear_gradients()

    def check_train_batch(self, batch: TrainBatch) -> None:
        """Raise InvalidArgumentError for a batch without what `train` needs of it, before anything is computed."""
        self.forward_pass.check_batch(batch)
        _check_columns(batch, self.settings.algorithm, is_prepared=False)

    def check_batch(self, batch: TrainBatch) -> None:
        """Raise what `forward_backward` raises for a batch that it cannot train, before it computes anything."""
        self.forward_pass.check_batch(batch)
        _check_columns(batch, self.settings.algorithm, is_prepared=True)

    def check_saved(self, training: SavedTensors) -> None:
        """Raise FailedPreconditionError if a checkpoint has what `restore` could not load. Nothing changes."""
        if self.critic:
            self.critic.check_saved(training)

    def snapshot(self, bucket_bytes: int, replaced: Snapshot | None = None, device: torch.device = _HOST) -> Snapshot:
        """Return a packed copy of the trained weights (`nexrl.weights.packing.snapshot`)."""
        packed = snapshot(
            self.trained.published(),
            policy_version=self.step,
            bucket_bytes=bucket_bytes,
            replaced=replaced,
            device=device,
        )
        return packed.of_base(self.trained.base_digest)

    def hold_state(self, folder: Path) -> HeldState:
        """Copy what this rank writes of a checkpoint to host memory, which the next call overwrites.

        All ranks must write theirs to `folder`, the same on all machines.
        """
        tensors = self.trained.tensors()
        writer_of = self.trained.writers(self.ranks.size)
        # A tied weight has several names. It is gathered once, and stays one tensor.
        first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
        distinct = {name: tensors[name].detach() for name in tensors if first_names[id(tensors[name])] == name}
        weights = self._held_weights.copy(self.ranks.gather(distinct, writer_of))
        named = {
            name: weights[first_names[id(tensor)]]
            for name, tensor in tensors.items()
            if writer_of[name] == self.ranks.rank
        }
        slices = {name: own_slice(tensor) for name, tensor in self._training_tensors().items()}
        copies = self._held_training.copy((name, part.tensor) for name, part in slices.items())
        training = {name: replace(part, tensor=copies[name]) for name, part in slices.items()}
        self._held_states += 1
        return HeldState(self.ranks, self.trained, named, training, self._held_states)

    def restore(self, weights: SavedTensors, training: SavedTensors, step: int, path: Path) -> None:
        """Load what any number of ranks have written at `path`, after `step` updates."""
        tensors = self.trained.tensors()
        for name in weights:
            weights.fill(name, tensors[name].detach())
        for name, (state, set_state) in random_states(self.model.device).items():
            # A rank that the checkpoint does not know continues as rank 0.
            own = name_at(name, self.ranks.rank)
            if (found := own if own in training else name) in training:
                training.fill(found, state)
                set_state(state)
        self.optimizer.load_tensors(training)
        self._objective.coefficients.load_tensors(training)
        if self._moving_reference:
            self._moving_reference.load_tensors(training)
        if self.critic:
            self.critic.load_tensors(training)
        self.step = step

    def _with_proximal(self, batch: TrainBatch) -> TrainBatch:
        """Add log-probabilities under the current weights, if the loss compares later updates of the step with them."""
        algorithm = self.settings.algorithm
        has_later = algorithm.mini_batches * algorithm.epochs > 1 and batch.token_count > 0
        if algorithm.loss not in PROXIMAL_LOSSES or not has_later:
            return batch
        return replace(batch, columns={**batch.columns, PROXIMAL: self.forward(batch)})

    def _with_moving_reference(self, batch: TrainBatch) -> TrainBatch:
        """Add log-probabilities under the reference model, if it follows the policy: only a step knows it."""
        if self._moving_reference is None:
            return batch
        return replace(batch, reference_logprobs_N=self.forward_reference(batch))

    def _with_advantages(
        self, batch: TrainBatch, values: Callable[[TrainBatch], NDArray[np.float32]]
    ) -> tuple[TrainBatch, ValueFigures | None]:
        """Add advantages, values and returns, which the critic of this moment decides: only a step knows them."""
        if self.critic is None or not batch.token_count:
            return batch, None
        assert isinstance(self.settings.algorithm, Ppo)
        return with_advantages(batch, values(batch), self.settings.algorithm)

    def _critic(self, model: PreTrainedModel) -> Critic:
        settings, algorithm = self.settings, self.settings.algorithm
        assert isinstance(algorithm, Ppo)
        of_policy = self.forward_pass.shares_prompts
        return Critic(
            model,
            CriticSettings(algorithm, settings.total_steps, settings.forward, settings.layers, of_policy),
            self.ranks,
        )

    def _training_tensors(self) -> dict[str, Tensor]:
        """Return what this rank writes besides weights. What all ranks have in common, rank 0 writes."""
        optimizer = self.optimizer.tensors() | self._objective.coefficients.tensors()
        if self._moving_reference:
            optimizer |= self._moving_reference.tensors()
        if self.critic:
            optimizer |= self.critic.tensors()
        if self.ranks.rank:
            optimizer = {name: tensor for name, tensor in optimizer.items() if isinstance(tensor, DTensor)}
        own = {name_at(name, self.ranks.rank): state for name, (state, _) in random_states(self.model.device).items()}
        return own | optimizer

    def _backward(
        self,
        batch: TrainBatch,
        micro: MicroBatch,
        weights_N: NDArray[np.float32],
        objective: Objective,
        totals: "LossTotals",
    ) -> None:
        token_ids_P = self._tensor(batch.token_ids_N[micro.tokens_P])
        has_bonus = objective.coefficients.entropy > 0
        scores = self.forward_pass.scores(micro, token_ids_P, entropy_has_gradient=has_bonus)
        if not len(token_ids_P):  # other ranks have more micro-batches, and wait for this one's part in the gradient
            scores.logprobs_P.sum().backward()
            return
        # Numbered from 0 in each call: a micro-batch holds whole sequences, but not all of the batch.
        _, sequence_P = np.unique(batch.sequence_of_tokens[micro.tokens_P], return_inverse=True)
        inputs = LossInputs(
            logprobs_T=scores.logprobs_P,
            rollout_logprobs_T=self._tensor(batch.rollout_logprobs_N[micro.tokens_P]),
            advantages_T=self._tensor(batch.advantages_N[micro.tokens_P]),
            weights_T=self._tensor(weights_N[micro.tokens_P]),
            sequence_T=self._tensor(sequence_P),
            columns=Columns({name: self._tensor(column) for name, column in batch.columns_of(micro.tokens_P).items()}),
        )
        reference_N = batch.reference_logprobs_N
        reference_P = None if reference_N is None else self._tensor(reference_N[micro.tokens_P])
        terms = objective(inputs, scores.entropy_P, reference_P)
        terms.objective.backward()
        totals.add(inputs, terms)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return self.forward_pass.tensor(array)


class MockLearner(Learner):
    """Counts steps and changes no weight (trainer.backend mock), for tests of everything around training."""

    def forward_backward(
        self, batch: TrainBatch, algorithm: AlgorithmSpec | None = None, *, denominator: int | None = None
    ) -> LossMetrics:
        return no_loss(len(batch.lengths_B))

    def update(self) -> OptimizerMetrics:
        return OptimizerMetrics(step=self.step + 1, lr=0.0, grad_norm=0.0)


def _check_columns(batch: TrainBatch, algorithm: AlgorithmSpec, *, is_prepared: bool) -> None:
    """`is_prepared`: the batch has what only a step can add."""
    needs_reference = algorithm.needs_reference if is_prepared else algorithm.needs_initial_model
    if needs_reference and batch.reference_logprobs_N is None:
        raise InvalidArgumentError("train batch: reference_logprobs_N: needed for klCoefficient and loss dpo")
    if isinstance(algorithm, Dpo):
        check_pairs(batch)
    if isinstance(algorithm, Ppo) and not (is_prepared and VALUES in batch.columns):
        check_critic_columns(batch)
