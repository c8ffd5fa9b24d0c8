"""The learner: agreement with plain PyTorch, invariance to the split, repeatability."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError, TrainingFailedError
from nexrl.models import iter_weights
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.correction import CorrectionSpec, RatioBand
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.losses import LOSSES, PROXIMAL
from nexrl_trainer.step import Learner
from nexrl_trainer.step_metrics import LossMetrics
from tests.support.families import plain_logprobs

BuildLearner = Callable[..., Learner]
BuildBatch = Callable[..., TrainBatch]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iter_weights(learner.model)}


def gradients(learner: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_gives_the_logprobs_of_the_whole_model(
    build_learner: BuildLearner, build_batch: BuildBatch, temperature: float
) -> None:
    learner, batch = build_learner(temperature=temperature, max_tokens=20), build_batch(seed=1)
    np.testing.assert_allclose(learner.forward(batch), plain_logprobs(learner.model, batch, temperature), atol=1e-5)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    max_tokens=st.integers(12, 40),
    chosen=st.fixed_dictionaries(
        {
            "loss": st.sampled_from(sorted(LOSSES)),
            "aggregation": st.sampled_from(["token", "sequence"]),
            "correction": st.sampled_from(
                [CorrectionSpec(), CorrectionSpec(sequence_band=RatioBand(low=0.3, high=3.0))]
            ),
        }
    ),
)
def test_gradient_and_metrics_do_not_depend_on_the_micro_batches(
    build_learner: BuildLearner, build_batch: BuildBatch, seed: int, max_tokens: int, chosen: dict[str, Any]
) -> None:
    batch = build_batch(seed)
    algorithm = {**chosen, "entropy_coefficient": 0.1, "kl_coefficient": 0.1}
    whole, split = build_learner(**algorithm), build_learner(**algorithm, max_tokens=max_tokens)
    expected, metrics = whole.forward_backward(batch), split.forward_backward(batch)
    assert asdict(metrics) == pytest.approx(asdict(expected), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradients(split), gradients(whole), rtol=1e-4, atol=1e-5)


def test_parts_of_a_step_with_its_denominator_accumulate_to_the_step(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    batch, whole, parts = build_batch(seed=2), build_learner(), build_learner()
    whole.forward_backward(batch)
    first = np.arange(len(batch.lengths_B)) < 2
    for rows in (first, ~first):
        parts.forward_backward(batch.select(rows), denominator=batch.token_count)
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"cross_entropy"}))
def test_on_policy_every_loss_trains_as_reinforce(
    build_learner: BuildLearner, build_batch: BuildBatch, loss: str
) -> None:
    reference, learner, batch = build_learner(loss="reinforce"), build_learner(loss=loss), build_batch(seed=3)
    on_policy = replace(batch, rollout_logprobs_N=learner.forward(batch))
    metrics = learner.forward_backward(on_policy)
    reference.forward_backward(on_policy)
    torch.testing.assert_close(gradients(learner), gradients(reference), rtol=1e-4, atol=1e-6)
    assert metrics.ratio_mean == pytest.approx(1, abs=1e-5)
    assert metrics.mismatch_kl == pytest.approx(0, abs=1e-6)
    assert metrics.clip_fraction == 0


def test_same_batches_give_the_same_weights_bit_for_bit(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    first, second = build_learner(entropy_coefficient=0.05), build_learner(entropy_coefficient=0.05)
    for step in range(3):
        assert first.train(build_batch(step)) == second.train(build_batch(step))
    assert all(torch.equal(tensor, weights(second)[name]) for name, tensor in weights(first).items())


def test_a_batch_with_nothing_to_train_counts_as_a_step_and_has_no_means(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    learner, batch = build_learner(), build_batch(seed=0)
    before = weights(learner)
    figures = learner.train(batch.select(np.zeros(len(batch.lengths_B), np.bool_))).figures()
    assert (figures["step"], figures["loss"], figures["token_count"]) == (1, 0, 0)
    assert not {"entropy", "ratio_mean", "mismatch_kl", "clip_fraction"} & figures.keys()
    assert learner.train(batch).figures()["entropy"] > 0
    assert before.keys() == weights(learner).keys()


def test_each_mini_batch_of_each_epoch_is_an_update_and_all_are_one_step(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    batch, first_B = build_batch(seed=6), np.arange(6) < 3
    learner, by_hand = build_learner(mini_batches=2, epochs=2), build_learner()
    metrics = learner.train(batch)
    losses = []
    for part in [batch.select(first_B), batch.select(~first_B)] * 2:
        losses.append(by_hand.forward_backward(part))
        lr = by_hand.update().lr
    assert all(torch.equal(tensor, weights(by_hand)[name]) for name, tensor in weights(learner).items())
    assert (metrics.updates, metrics.skipped_updates, metrics.step, learner.step, metrics.lr) == (4, 0, 1, 1, lr)
    assert (metrics.token_count, metrics.sequence_count) == (batch.token_count, 6)
    assert metrics.ratio_max == max(loss.ratio_max for loss in losses)
    tokens = [loss.token_count for loss in losses]
    assert metrics.entropy == pytest.approx(np.average([loss.entropy for loss in losses], weights=tokens))


def test_an_update_that_is_not_finite_is_skipped_and_counted(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    batch, first_B = build_batch(seed=6), np.arange(6) < 3
    advantages_N = batch.advantages_N.copy()
    advantages_N[np.repeat(~first_B, batch.lengths_B)] = np.inf
    learner, without = build_learner(mini_batches=2), build_learner()
    metrics = learner.train(replace(batch, advantages_N=advantages_N))
    assert metrics.token_count == without.train(batch.select(first_B)).token_count
    assert (metrics.updates, metrics.skipped_updates, learner.step) == (1, 1, 1)
    assert all(torch.equal(tensor, weights(without)[name]) for name, tensor in weights(learner).items())


def test_a_step_without_a_finite_update_fails_and_changes_nothing(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    learner, batch = build_learner(mini_batches=2, epochs=2), build_batch(seed=6)
    before = weights(learner)
    with pytest.raises(TrainingFailedError):
        learner.train(replace(batch, advantages_N=np.full_like(batch.advantages_N, np.inf)))
    assert learner.is_between_steps
    assert learner.step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


def test_weights_with_some_updates_of_a_step_are_not_between_steps(
    build_learner: BuildLearner, build_batch: BuildBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, made = build_learner(mini_batches=2), []

    def raises_in_the_second(part: TrainBatch) -> LossMetrics:
        made.append(part)
        if len(made) == 2:
            raise TrainingFailedError("the user's loss raised") from ValueError("mine")
        return Learner.forward_backward(learner, part)

    monkeypatch.setattr(learner, "forward_backward", raises_in_the_second)
    with pytest.raises(TrainingFailedError, match="the user's loss"):
        learner.train(build_batch(seed=6))
    assert not learner.is_between_steps


def test_all_updates_of_a_step_of_decoupled_ppo_are_compared_with_its_start(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    batch, algorithm = build_batch(seed=6), {"loss": "decoupled_ppo", "learning_rate": 0.1}
    learner, by_hand, without = (build_learner(**algorithm, mini_batches=2, epochs=2) for _ in range(3))
    learner.train(batch)
    with_start = replace(batch, columns={PROXIMAL: by_hand.forward(batch)})
    for part in with_start.parts(2) * 2:
        by_hand.forward_backward(part)
        by_hand.update()
    for part in batch.parts(2) * 2:
        without.forward_backward(part)
        without.update()
    assert all(torch.equal(tensor, weights(by_hand)[name]) for name, tensor in weights(learner).items())
    assert not all(torch.equal(tensor, weights(without)[name]) for name, tensor in weights(learner).items())


def test_a_step_of_one_update_of_decoupled_ppo_needs_no_forward_pass_before(
    build_learner: BuildLearner, build_batch: BuildBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build_learner(loss="decoupled_ppo")
    monkeypatch.setattr(learner, "forward", lambda batch: pytest.fail("log-probabilities were computed"))
    assert learner.train(build_batch(seed=6)).updates == 1


@pytest.mark.parametrize(("sequences", "count", "sizes"), [(6, 4, [2, 1, 2, 1]), (6, 3, [2, 2, 2]), (2, 5, [1, 1])])
def test_parts_of_a_batch_are_all_its_sequences_in_their_order(
    build_batch: BuildBatch, sequences: int, count: int, sizes: list[int]
) -> None:
    batch = build_batch(seed=7, sequences=sequences)
    parts = batch.parts(count)
    assert [len(part.lengths_B) for part in parts] == sizes
    np.testing.assert_array_equal(np.concatenate([part.token_ids_N for part in parts]), batch.token_ids_N)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_raises_the_probability_of_what_was_good(build_learner: BuildLearner, dtype: str) -> None:
    learner = build_learner(dtype=dtype)
    mask, zeros = [False, True, True], [0.0, 0.0, 0.0]
    batch = TrainBatch.pack([TrainSequence([1, 5, 6], mask, zeros, 1.0), TrainSequence([1, 7, 8], mask, zeros, -1.0)])
    algorithm = AlgorithmSpec(loss="reinforce")
    before_N = learner.forward(batch)
    for _ in range(3):
        learner.forward_backward(batch, algorithm)
        learner.optimizer_step()
    change_N = learner.forward(batch) - before_N
    assert change_N[1:3].sum() > 0 > change_N[4:].sum()


def test_updates_too_small_for_bfloat16_add_up(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    learner, batch = build_learner(dtype="bfloat16", learning_rate=1e-4, warmup_steps=0), build_batch(seed=4)
    norm = dict(learner.model.named_parameters())["model.norm.weight"]  # ones: neighbours are 2^-8 away
    for _ in range(10):
        learner.train(batch)
    masters = learner.optimizer.tensors()["master.model.norm.weight"]
    assert torch.equal(norm, torch.ones_like(norm))
    assert (masters - 1).abs().max() > 5e-4


def test_a_batch_with_nothing_to_train_changes_no_weight_and_counts_as_a_step(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    learner = build_learner()
    learner.train(build_batch(seed=5))
    before = weights(learner)
    metrics = learner.train(TrainBatch.pack([]))
    assert (metrics.step, metrics.token_count, metrics.loss) == (2, 0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


def test_a_gradient_that_is_not_finite_stops_training_before_the_weights_are_touched(
    build_learner: BuildLearner,
) -> None:
    learner = build_learner()
    before = weights(learner)
    with pytest.raises(TrainingFailedError, match=r"step 1: gradient norm is (inf|nan)"):
        learner.train(TrainBatch.pack([TrainSequence([1, 5], [False, True], [0, 0], 3e38)]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


@pytest.mark.parametrize("name", ["rollout_logprobs_N", "advantages_N"])
def test_a_loss_that_is_not_finite_is_no_step(build_learner: BuildLearner, build_batch: BuildBatch, name: str) -> None:
    learner, batch = build_learner(), build_batch(seed=0)
    getattr(batch, name)[np.flatnonzero(batch.loss_mask_N)[0]] = np.nan
    with pytest.raises(TrainingFailedError, match=r"algorithm\.loss ppo_clip: the loss of the step is nan"):
        learner.train(batch)
    assert learner.step == 0


def test_entropy_bonus_raises_entropy(build_learner: BuildLearner, build_batch: BuildBatch) -> None:
    batch = build_batch(seed=6)
    learner = build_learner(loss="reinforce", entropy_coefficient=1.0, learning_rate=1e-3)
    still = replace(batch, advantages_N=0 * batch.advantages_N)
    before = learner.train(still).entropy
    assert learner.train(still).entropy > before


def test_the_denominator_of_constant_aggregation_is_that_of_the_experiment(
    build_learner: BuildLearner, build_batch: BuildBatch
) -> None:
    batch, learners = build_batch(seed=7), [build_learner(aggregation="constant", constant_tokens=n) for n in (1, 8)]
    one, eight = (learner.forward_backward(batch).loss for learner in learners)
    assert one == pytest.approx(8 * eight, rel=1e-4)
    torch.testing.assert_close(gradients(learners[0]), 8 * gradients(learners[1]), rtol=1e-4, atol=1e-6)


def test_kl_penalty_without_reference_logprobs_is_refused(build_learner: BuildLearner) -> None:
    batch = TrainBatch.pack([TrainSequence([1, 5], [False, True], [0, 0], 1.0)])
    with pytest.raises(InvalidArgumentError, match="reference_logprobs_N"):
        build_learner(kl_coefficient=0.1).train(batch)
