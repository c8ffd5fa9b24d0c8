"""What a correction leaves out of the loss."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nexrl.algorithm import LossInputs
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.correction import CorrectionSpec, RatioBand
from nexrl_trainer.correction import left_out
from nexrl_trainer.losses import PROXIMAL
from nexrl_trainer.objective import Objective

# Ratios of sequence 0: 1, 4, 0.25; of 1: 1.2, 1.2; of 2: 0.001, 1. Advantages: 1, -1, 1.
RATIOS_T = torch.tensor([1.0, 1.2, 4.0, 0.25, 1.2, 0.001, 1.0])
SEQUENCE_T = torch.tensor([0, 1, 0, 0, 1, 2, 2])
LOGPROBS_T = RATIOS_T.log()
ADVANTAGES_T = torch.tensor([1.0, -1.0, 1.0])[SEQUENCE_T]


def inputs(logprobs_T: torch.Tensor = LOGPROBS_T) -> LossInputs:
    return LossInputs(logprobs_T, torch.zeros(7), ADVANTAGES_T, torch.full((7,), 1 / 7), SEQUENCE_T)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (CorrectionSpec(token_band=RatioBand(low=0.5, high=3.0)), [2, 3, 5]),
        (CorrectionSpec(token_band=RatioBand(low=0.0, high=1.1)), [1, 2, 4]),
        (CorrectionSpec(sequence_band=RatioBand(low=0.5, high=1.1)), [1, 4, 5, 6]),
        (CorrectionSpec(veto_ratio=0.01), [5, 6]),
        (CorrectionSpec(veto_ratio=0.3), [0, 2, 3, 5, 6]),
        (CorrectionSpec(token_band=RatioBand(low=0.0, high=3.0), veto_ratio=0.01), [2, 5, 6]),
    ],
)
def test_tokens_and_sequences_beyond_a_limit_are_left_out(correction: CorrectionSpec, expected: list[int]) -> None:
    found_T = left_out(inputs(), correction)
    assert found_T is not None
    assert found_T.nonzero().flatten().tolist() == expected


def test_a_sequence_that_drifted_is_left_out_only_if_its_advantage_is_negative() -> None:
    drifted = inputs(torch.where(SEQUENCE_T == 0, 0.0, -0.5))
    found_T = left_out(drifted, CorrectionSpec(negative_drift=0.4))
    assert found_T is not None
    assert found_T.nonzero().flatten().tolist() == [1, 4]
    found_T = left_out(drifted, CorrectionSpec(negative_drift=0.6))
    assert found_T is not None
    assert not found_T.any()


def test_where_the_start_of_the_step_is_known_it_is_what_is_compared_with_the_rollout() -> None:
    start = replace(inputs(LOGPROBS_T - 9), columns={PROXIMAL: LOGPROBS_T})
    found_T = left_out(start, CorrectionSpec(veto_ratio=0.01))
    assert found_T is not None
    assert found_T.nonzero().flatten().tolist() == [5, 6]


def test_without_a_rule_nothing_is_computed() -> None:
    assert left_out(inputs(), CorrectionSpec()) is None


def test_what_is_left_out_has_no_gradient_and_the_weights_of_the_rest_stay() -> None:
    gradients = []
    for correction in (CorrectionSpec(), CorrectionSpec(token_band=RatioBand(low=0.5, high=3.0))):
        logprobs_T = LOGPROBS_T.clone().requires_grad_()
        algorithm = AlgorithmSpec(loss="reinforce", correction=correction, entropy_coefficient=1.0, kl_coefficient=1.0)
        terms = Objective(algorithm, Path())(inputs(logprobs_T), logprobs_T.square(), torch.ones(7))
        gradients.append(torch.autograd.grad(terms.objective, logprobs_T)[0].numpy())
        if correction != CorrectionSpec():
            assert terms.left_out_T.nonzero().flatten().tolist() == [2, 3, 5]
    wanted = gradients[0].copy()
    wanted[[2, 3, 5]] = 0
    np.testing.assert_array_equal(gradients[1], wanted)
