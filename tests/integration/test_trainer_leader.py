"""Rank 0 leads the other ranks of a trainer, real processes over Gloo: checkpoints, weights, failed batches."""

import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import leader_process
from tests.support.leader_process import Done, Work
from tests.support.patience import LIMIT_SECONDS
from tests.support.rank_process import RankCase

STEPS = (9, 3, 12, 8, 5, 7)
WEIGHT_TOLERANCE, FIGURE_TOLERANCE = 2e-6, 2e-5
"""Those of test_trainer_ranks.py."""
SPOILED = """
import torch
from nexrl.algorithm import LossInputs, LossOutputs

calls = 0

def sound(inputs: LossInputs) -> LossOutputs:
    loss = -(inputs.weights_T * inputs.logprobs_T).sum()
    return LossOutputs(loss, torch.zeros_like(inputs.logprobs_T, dtype=bool))

def not_finite_at_first(inputs: LossInputs) -> LossOutputs:
    global calls
    calls += 1
    outputs = sound(inputs)
    return LossOutputs(outputs.loss * float("nan"), outputs.clipped_T) if calls == 1 else outputs
"""

# Only one process imports torch. The ranks are forks of it.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([leader_process.__name__])


def done(folder: Path, size: int, work: Work) -> Done:
    """Do the work on so many ranks."""
    ours, theirs = _processes.Pipe()
    meeting = Path(tempfile.mkdtemp(dir=folder)) / "rendezvous"
    arguments: Any = [(rank, size, meeting, work, None if rank else theirs) for rank in range(size)]
    ranks = [_processes.Process(target=leader_process.main, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_SECONDS)
        found: Done = ours.recv()
        return found
    finally:
        for process in ranks:
            process.kill()
            process.join()


def assert_close(found: Done, expected: Done) -> None:
    for figures, wanted in zip(found.figures, expected.figures, strict=True):
        assert figures == pytest.approx(wanted, rel=FIGURE_TOLERANCE, abs=1e-6)
    weights, wanted_weights = (np.frombuffer(each.weights, np.float32) for each in (found, expected))
    np.testing.assert_allclose(weights, wanted_weights, rtol=0, atol=WEIGHT_TOLERANCE)


def assert_holds_its_half_only(checkpoint: Path) -> None:
    """Check that each of two ranks has written about half of the weights, and only its slices of the optimizer."""
    weights, states = (
        [load_file(checkpoint / f"{name}-0000{rank}-of-00002.safetensors") for rank in (1, 2)]
        for name in ("model", "training_state")
    )
    for tensors in (weights, states):
        first, second = (sum(tensor.nbytes for tensor in each.values()) for each in tensors)
        assert 0.3 < first / (first + second) < 0.7
    whole = {name: tensor.shape for each in weights for name, tensor in each.items()}
    for state in states:
        moments = {name: tensor for name, tensor in state.items() if name.startswith("exp_avg.")}
        assert moments
        assert all(len(moment) < whole[name.removeprefix("exp_avg.")][0] for name, moment in moments.items())


@pytest.mark.gate
def test_a_checkpoint_of_two_ranks_continues_on_one_on_four_and_bit_for_bit_on_two(tmp_path: Path) -> None:
    case = RankCase(STEPS, {"loss": "ppo_clip", "kl_coefficient": 0.1})
    whole, alone = done(tmp_path, 2, Work(case)), done(tmp_path, 1, Work(case))
    assert_close(whole, alone)
    first = RankCase(STEPS[:3], case.algorithm)
    done(tmp_path, 2, Work(first, save_in=tmp_path))
    assert_holds_its_half_only(tmp_path / "global_step_3")
    rest = Work(case, first=3, begin=tmp_path / "global_step_3")
    assert done(tmp_path, 2, rest) == Done(whole.figures[3:], whole.weights, [])
    for size in (1, 4):
        assert_close(done(tmp_path, size, rest), Done(alone.figures[3:], alone.weights, []))


@pytest.mark.soak
def test_an_adapter_of_two_ranks_continues_on_one_and_bit_for_bit_on_two(tmp_path: Path) -> None:
    case = RankCase(STEPS[:4], {"loss": "ppo_clip"}, is_lora=True)
    whole, alone = done(tmp_path, 2, Work(case)), done(tmp_path, 1, Work(case))
    assert_close(whole, alone)
    assert whole.base_digest == alone.base_digest != ""
    references, expected = (np.frombuffer(each.references, np.float32) for each in (whole, alone))
    np.testing.assert_allclose(references, expected, rtol=0, atol=FIGURE_TOLERANCE)
    done(tmp_path, 2, Work(RankCase(STEPS[:2], case.algorithm, is_lora=True), save_in=tmp_path))
    rest = Work(case, first=2, begin=tmp_path / "global_step_2")
    assert done(tmp_path, 2, rest) == whole._replace(figures=whole.figures[2:])
    assert_close(done(tmp_path, 1, rest), alone._replace(figures=alone.figures[2:]))


@pytest.mark.parametrize(
    ("optimizer", "data_type"), [("muon", "float32"), pytest.param("adamw", "bfloat16", marks=pytest.mark.soak)]
)
def test_a_checkpoint_of_other_moments_or_masters_continues_bit_for_bit_on_two_ranks(
    tmp_path: Path, optimizer: str, data_type: Literal["float32", "bfloat16"]
) -> None:
    case = RankCase(STEPS[:4], {"loss": "reinforce", "optimizer": optimizer}, data_type=data_type)
    whole = done(tmp_path, 2, Work(case))
    done(tmp_path, 2, Work(replace(case, sequences=STEPS[:2]), save_in=tmp_path))
    rest = Work(case, first=2, begin=tmp_path / "global_step_2")
    assert done(tmp_path, 2, rest) == Done(whole.figures[2:], whole.weights, [])


@pytest.mark.gate
def test_a_batch_whose_loss_is_not_finite_leaves_no_gradient_on_any_rank(tmp_path: Path) -> None:
    (tmp_path / "spoiled_at_first.py").write_text(SPOILED)
    spoiled, sound = (
        RankCase([9, 9], {"loss": f"spoiled_at_first:{name}"}, tmp_path) for name in ("not_finite_at_first", "sound")
    )
    failed = done(tmp_path, 2, Work(spoiled))
    (error,) = failed.errors
    assert "the loss of the step is nan" in error
    assert failed[:2] == done(tmp_path, 2, Work(sound, first=1))[:2]
