"""Preference losses: which samples are paired, DPO against its formula, and that pairs may be split in any way."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError
from nexrl.spec.algorithm import AlgorithmSpec, Dpo
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.preference import PAIR, check_pairs, dpo, preference_pairs, with_preferences
from nexrl_trainer.step import Learner

BuildLearner = Callable[..., Learner]


def pairs_of(rewards: Sequence[float], groups: Sequence[int], kept: Sequence[bool] = ()) -> list[int]:
    kept_S = np.array(kept or [True] * len(rewards))
    pairs_S: list[int] = preference_pairs(np.array(rewards, float), np.array(groups), kept_S).tolist()
    return pairs_S


def test_the_best_of_a_group_is_paired_with_its_worst_and_so_on_while_rewards_differ() -> None:
    assert pairs_of([0.5, 2.0, 0.0, 1.0], [0, 0, 0, 0]) == [-2, 1, -1, 2]
    assert pairs_of([1.0, 3.0, 2.0], [0, 0, 0]) == [-1, 1, 0]  # the middle one is in no pair
    assert pairs_of([1.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 0]) == [1, -2, -1, 2, 0]  # equal ones in their order
    assert pairs_of([1.0, 1.0], [0, 0]) == [0, 0]
    assert pairs_of([1.0, 0.0, 1.0, 0.0], [5, 5, 2, 2]) == [2, -2, 1, -1]
    assert pairs_of([2.0, 1.0, 0.0], [0, 0, 0], [False, True, True]) == [0, 1, -1]
    assert pairs_of([1.0], [0]) == [0]


def build_pairs(seed: int, pairs: int) -> TrainBatch:
    """A batch of pairs in random order, some of whose sides have two sequences of their own; masks have holes."""
    random = np.random.default_rng(seed)
    sides = [sign * pair for pair in range(1, pairs + 1) for sign in (1, -1) for _ in range(random.integers(1, 3))]
    contexts = [random.integers(4, 15, int(random.integers(1, 5))) for _ in range(2)]

    def sequence(pair: int) -> TrainSequence:
        own = int(random.integers(1, 7))
        context = contexts[pair % 2]
        mask = np.concatenate([np.zeros(len(context), bool), [True], random.random(own - 1) < 0.6])
        logprobs = -3 * random.random((2, len(mask)))
        return TrainSequence(
            np.concatenate([context, random.integers(4, 15, own)]), mask, logprobs[0], 0.0, logprobs[1], {PAIR: pair}
        )

    return TrainBatch.pack([sequence(pair) for pair in random.permutation(sides).tolist()])


@given(
    margins=st.lists(st.floats(-60, 60), min_size=1, max_size=8),
    beta=st.floats(0.01, 3),
    label_smoothing=st.floats(0, 0.49),
)
def test_dpo_has_value_and_derivative_of_its_formula(margins: list[float], beta: float, label_smoothing: float) -> None:
    margin_P = torch.tensor(margins, dtype=torch.float64, requires_grad=True)
    log_sigmoid = torch.nn.functional.logsigmoid
    expected_P = -(1 - label_smoothing) * log_sigmoid(beta * margin_P) - label_smoothing * log_sigmoid(-beta * margin_P)
    (expected_slope_P,) = torch.autograd.grad(expected_P.sum(), margin_P)
    loss_P, slope_P = dpo(np.array(margins), beta, label_smoothing)
    np.testing.assert_allclose(loss_P, expected_P.detach(), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(slope_P, expected_slope_P, rtol=1e-6, atol=1e-12)


def direct_loss(learner: Learner, batch: TrainBatch, beta: float, label_smoothing: float) -> torch.Tensor:
    """Mean DPO loss of the pairs, in one graph: each sequence alone through the model, without padding."""
    assert batch.reference_logprobs_N is not None
    ends = np.cumsum(batch.lengths_B).tolist()
    margins: dict[int, torch.Tensor] = {}
    for start, end, pair in zip([0, *ends], ends, batch.columns[PAIR].tolist(), strict=False):
        ids_T, mask_T = torch.tensor(batch.token_ids_N[start:end]), torch.tensor(batch.loss_mask_N[start:end])
        logprobs_TV = learner.model(ids_T[None]).logits[0, :-1].log_softmax(-1)
        own_T = logprobs_TV.gather(1, ids_T[1:, None])[:, 0]
        log_ratio_T = (own_T - torch.tensor(batch.reference_logprobs_N[start + 1 : end])) * mask_T[1:]
        margins[abs(pair)] = margins.get(abs(pair), torch.tensor(0.0)) + np.sign(pair) * log_ratio_T.sum()
    h_P = beta * torch.stack(list(margins.values()))
    log_sigmoid = torch.nn.functional.logsigmoid
    return (-(1 - label_smoothing) * log_sigmoid(h_P) - label_smoothing * log_sigmoid(-h_P)).mean()


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    masters = learner.optimizer._masters
    return {name: master.grad for name, master in masters.items() if master.grad is not None}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), pairs=st.integers(1, 5), max_tokens=st.integers(12, 60))
def test_loss_and_gradient_are_those_of_whole_pairs_however_they_are_split_into_micro_batches(
    build_learner: BuildLearner, seed: int, pairs: int, max_tokens: int
) -> None:
    batch, beta, label_smoothing = build_pairs(seed, pairs), 0.7, 0.1
    learner = build_learner(loss="dpo", beta=beta, label_smoothing=label_smoothing, max_tokens=max_tokens)
    metrics = learner.forward_backward(batch)
    loss = direct_loss(learner, batch, beta, label_smoothing)
    expected = torch.autograd.grad(loss, list(learner.model.parameters()))
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    for found, wanted in zip(gradients(learner).values(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_each_epoch_has_the_loss_of_the_weights_that_it_begins_with(build_learner: BuildLearner) -> None:
    batch = build_pairs(seed=1, pairs=4)
    twice, single = build_learner(loss="dpo", epochs=2), build_learner(loss="dpo")
    both = twice.train(batch)
    first = single.forward_backward(batch)
    single.update()
    second = single.forward_backward(batch)
    assert second.loss < first.loss
    assert both.loss == pytest.approx((first.loss + second.loss) / 2, rel=1e-5)


def test_the_first_loss_of_the_initial_model_is_log_2_and_steps_widen_the_margin(build_learner: BuildLearner) -> None:
    learner = build_learner(loss="dpo", beta=0.5)
    batch = build_pairs(seed=2, pairs=6)
    batch = replace(batch, reference_logprobs_N=learner.forward(batch))
    losses = [learner.train(batch).loss for _ in range(6)]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5)
    assert losses[-1] < 0.6


def test_bonus_and_penalty_are_weighted_by_token_beside_the_pairs(build_learner: BuildLearner) -> None:
    batch = build_pairs(seed=3, pairs=3)
    plain, with_penalty = build_learner(loss="dpo"), build_learner(loss="dpo", kl_coefficient=0.5)
    without, beside = (asdict(learner.forward_backward(batch)) for learner in (plain, with_penalty))
    assert beside["loss"] - without["loss"] == pytest.approx(0.5 * without["reference_kl"], rel=1e-4)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([{}, {}], "needs an integer for each sequence"),
        ([{PAIR: 1}, {}], "needs an integer"),
        ([{PAIR: 0}, {PAIR: 1}], "needs an integer"),
        ([{PAIR: [1, 1]}, {PAIR: -1}], "needs an integer for each sequence"),
        ([{PAIR: 1}, {PAIR: -2}], "pair 1 has only one side"),
        ([{PAIR: 3}, {PAIR: 3}], "pair 3 has only one side"),
    ],
)
def test_a_batch_that_is_not_made_of_pairs_is_refused(
    build_learner: BuildLearner, columns: Sequence[dict[str, Any]], message: str
) -> None:
    sequences = [TrainSequence([4, 5], [False, True], [0, -1.0], 0.0, [0, -1.0], each) for each in columns]
    with pytest.raises(InvalidArgumentError, match=message):
        build_learner(loss="dpo").train(TrainBatch.pack(sequences))


def test_pairs_without_reference_logprobs_or_in_several_batches_are_refused(build_learner: BuildLearner) -> None:
    batch, learner = build_pairs(seed=4, pairs=2), build_learner(loss="dpo")
    with pytest.raises(InvalidArgumentError, match="reference_logprobs_N: needed for klCoefficient and loss dpo"):
        learner.train(replace(batch, reference_logprobs_N=None))
    with pytest.raises(InvalidArgumentError, match="all pairs of a step in one batch"):
        learner.forward_backward(batch, denominator=8)


def test_a_batch_without_pairs_counts_as_a_step(build_learner: BuildLearner) -> None:
    empty = replace(TrainBatch.pack([]), reference_logprobs_N=np.zeros(0, np.float32))
    check_pairs(empty)
    algorithm = AlgorithmSpec(loss="dpo")
    assert isinstance(algorithm, Dpo)
    assert with_preferences(empty, np.zeros(0, np.float32), algorithm) is empty
    learner = build_learner(loss="dpo")
    learner.train(empty)
    assert learner.step == 1
