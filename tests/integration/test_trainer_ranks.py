"""Trainer ranks, real processes over Gloo: what is learned does not depend on their number."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nexrl_trainer.losses import LOSSES
from tests.support.rank_process import RankCase, train
from tests.support.rank_processes import ON_CPUS, RankProcesses, Tolerance, assert_as_on_one_rank

pytestmark = pytest.mark.xdist_group("ranks")  # one process starts the ranks, for all tests

MAX_RANKS = 4
STEPS = [9, 3, 0, 12, 1, 8]
"""Sequences of each step: more than ranks, fewer than ranks, none."""
AGGREGATIONS = {"ppo_clip": "token", "cispo": "sequence", "reinforce": "constant", "gspo": "sequence"}

OF_MUON = Tolerance(metric=2e-2, logprob=2e-2, weight=2e-3)
"""It multiplies in bfloat16, and ranks add up parts of the products. An update moves a weight by up to 0.012."""

BFLOAT16_TOLERANCE = 2.0**-7
"""Twice the distance of bfloat16 numbers of the size of these weights and gradients, near 0.5."""

USER_LOSSES = """
import torch
from nexrl.algorithm import LossInputs, LossOutputs

def of_one_sequence(inputs: LossInputs) -> LossOutputs:
    is_chosen_T = inputs.columns["number"] == 2
    clipped_T = torch.zeros_like(is_chosen_T)
    if not is_chosen_T.any():
        return LossOutputs(torch.zeros(()), clipped_T)
    return LossOutputs(-(inputs.weights_T * inputs.logprobs_T)[is_chosen_T].sum(), clipped_T)

def infinite_gradient_of_one_sequence(inputs: LossInputs) -> LossOutputs:
    zero_T = inputs.logprobs_T - inputs.logprobs_T.detach()
    is_chosen_T = inputs.columns["number"] == 2
    return LossOutputs(torch.where(is_chosen_T, zero_T.abs().sqrt(), zero_T).sum(), torch.zeros_like(is_chosen_T))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    ranks = RankProcesses(tmp_path_factory.mktemp("ranks"), MAX_RANKS)
    yield ranks
    ranks.end()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_metrics_and_weights_do_not_depend_on_the_number_of_ranks(ranks: RankProcesses, loss: str, size: int) -> None:
    algorithm = {"aggregation": AGGREGATIONS.get(loss, "token"), "entropy_coefficient": 0.05, "kl_coefficient": 0.1}
    constant = {"constant_tokens": 8} if algorithm["aggregation"] == "constant" else {}
    case = RankCase(STEPS, {"loss": loss, **algorithm, **constant})
    (by_rank,) = ranks.train(size, [case])
    assert_as_on_one_rank(train(case), by_rank)


@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled_ppo"])
def test_mini_batches_and_epochs_do_not_depend_on_the_number_of_ranks(ranks: RankProcesses, loss: str) -> None:
    case = RankCase(STEPS, {"loss": loss, "mini_batches": 2, "epochs": 2})
    (by_rank,) = ranks.train(2, [case])
    assert_as_on_one_rank(train(case), by_rank)


@pytest.mark.parametrize("is_lora", [False, True])
def test_pairs_do_not_depend_on_the_number_of_ranks(ranks: RankProcesses, is_lora: bool) -> None:
    case = RankCase([8, 2, 0, 6], {"loss": "dpo", "epochs": 2, "kl_coefficient": 0.1}, is_lora=is_lora)
    (by_rank,) = ranks.train(2, [case])
    assert_as_on_one_rank(train(case), by_rank)


@pytest.mark.parametrize("follows", [{"type": "refreshed", "every_steps": 2}, {"type": "average", "decay": 0.5}])
def test_a_moving_reference_does_not_depend_on_the_number_of_ranks(
    ranks: RankProcesses, follows: dict[str, object]
) -> None:
    case = RankCase(STEPS, {"loss": "ppo_clip", "kl_coefficient": 1.0, "reference": follows})
    (by_rank,) = ranks.train(2, [case])
    assert_as_on_one_rank(train(case), by_rank)


def test_a_critic_does_not_depend_on_the_number_of_ranks(ranks: RankProcesses) -> None:
    case = RankCase(STEPS, {"type": "ppo", "mini_batches": 2, "critic": {"learning_rate": 1e-2}})
    (by_rank,) = ranks.train(2, [case])
    assert_as_on_one_rank(train(case), by_rank)


@pytest.mark.parametrize("size", [2, 3])
def test_muon_does_not_depend_on_the_number_of_ranks(ranks: RankProcesses, size: int) -> None:
    case = RankCase(STEPS, {"optimizer": "muon"})
    (by_rank,) = ranks.train(size, [case])
    assert_as_on_one_rank(train(case), by_rank, OF_MUON)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_an_adapter_does_not_depend_on_the_number_of_ranks(ranks: RankProcesses, loss: str, size: int) -> None:
    algorithm = {"loss": loss, "entropy_coefficient": 0.05, "kl_coefficient": 0.1}
    case = RankCase(STEPS, algorithm, is_lora=True)
    alone, (by_rank,) = train(case), ranks.train(size, [case])
    assert_as_on_one_rank(alone, by_rank)
    for trained in by_rank:
        for logprobs_N, expected_N in zip(trained.references, alone.references, strict=True):
            np.testing.assert_allclose(logprobs_N, expected_N, rtol=0, atol=ON_CPUS.logprob)
    assert np.abs(alone.references[-1] - alone.logprobs[-1]).max() > 100 * ON_CPUS.logprob


def test_an_adapter_of_a_16_bit_model_trains_on_several_ranks(ranks: RankProcesses) -> None:
    case = RankCase([9, 3, 0, 8], {"loss": "ppo_clip"}, data_type="bfloat16", is_lora=True)
    alone, (by_rank,) = train(case), ranks.train(2, [case])
    for trained in by_rank:
        assert trained.metrics == by_rank[0].metrics
        for name, weight in alone.weights.items():
            np.testing.assert_allclose(trained.weights[name], weight, rtol=0, atol=BFLOAT16_TOLERANCE, err_msg=name)


def test_chunks_of_logits_change_nothing_on_several_ranks(ranks: RankProcesses) -> None:
    case = RankCase(STEPS, {"loss": "cispo", "entropy_coefficient": 0.05, "kl_coefficient": 0.1})
    (by_rank,) = ranks.train(2, [replace(case, chunk_rows=2)])
    assert_as_on_one_rank(train(case), by_rank)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_model_and_work(ranks: RankProcesses, size: int) -> None:
    case = RankCase([64], {"loss": "reinforce"})
    alone, (by_rank,) = train(case), ranks.train(size, [case])
    for trained in by_rank:
        assert trained.shard_bytes < 1.05 * alone.shard_bytes / size
        assert trained.passes[0] < 1.5 * alone.passes[0] / size


def test_masters_of_a_16_bit_model_are_in_float32_on_all_ranks(ranks: RankProcesses) -> None:
    case = RankCase([9, 3, 0, 8], {"loss": "ppo_clip"}, data_type="bfloat16")
    alone, (by_rank,) = train(case), ranks.train(2, [case])
    for trained in by_rank:
        assert trained.metrics == by_rank[0].metrics
        for name, master in alone.masters.items():
            assert master.dtype == trained.masters[name].dtype == np.float32
            np.testing.assert_allclose(trained.masters[name], master, rtol=0, atol=BFLOAT16_TOLERANCE, err_msg=name)


def test_a_loss_of_the_user_is_checked_over_all_ranks(ranks: RankProcesses, tmp_path: Path) -> None:
    (tmp_path / "user_losses.py").write_text(USER_LOSSES)
    sound, wrong = (
        RankCase([9, 3], {"loss": f"user_losses:{name}"}, tmp_path)
        for name in ("of_one_sequence", "infinite_gradient_of_one_sequence")
    )
    by_rank, failed = ranks.train(4, [sound, wrong])
    assert_as_on_one_rank(train(sound), by_rank)
    assert len({trained.error for trained in failed}) == 1
    assert "TrainingFailedError" in failed[0].error
    assert "its gradient by logprobs_T is not finite" in failed[0].error
