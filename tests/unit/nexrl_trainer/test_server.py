"""What the experiment asks of the trainer's parts."""

import json
from pathlib import Path

import pytest
import torch

from nexrl.models import iter_weights
from nexrl.spec import ExperimentSpec
from nexrl_trainer.server import build_learner, reference_logprobs, run_checkpoints
from nexrl_trainer.step import Learner, MockLearner


def spec(**sections: object) -> ExperimentSpec:
    shape = {"alphabet": "01", "hiddenSize": 8, "intermediateSize": 8, "layers": 1, "heads": 1, "maxPositions": 32}
    document = {"model": {"scratch": shape}, "data": {"type": "mock"}, "trainer": {"steps": 10}}
    room = {"rollout": {"maxNewTokens": 8}, "inference": {"maxTokensPerRow": 32}}
    return ExperimentSpec.model_validate_json(json.dumps(document | room | sections))


@pytest.mark.guide("J8")
def test_the_learner_begins_at_step_0_with_the_weights_of_the_experiment() -> None:
    first, second = build_learner(spec()), build_learner(spec())
    assert (type(first), first.step) == (Learner, 0)
    weights = dict(iter_weights(second.model))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in iter_weights(first.model))


@pytest.mark.guide("Q28")
def test_the_backend_decides_who_learns() -> None:
    assert isinstance(build_learner(spec(trainer={"steps": 10, "backend": "mock"})), MockLearner)


def test_only_a_penalty_needs_the_initial_model() -> None:
    assert reference_logprobs(spec()) is None
    assert reference_logprobs(spec(algorithm={"klCoefficient": 0.1})) is not None


@pytest.mark.guide("Q21", "Q41", "Q42")
def test_checkpoints_are_where_the_experiment_says_and_start_from_what_it_names(tmp_path: Path) -> None:
    default = run_checkpoints(tmp_path, spec())
    assert (default.folder, default.start_from) == (tmp_path / "checkpoints", None)
    resume = {"mode": "from_path", "path": "/kept/global_step_3"}
    chosen = run_checkpoints(tmp_path, spec(checkpoint={"path": str(tmp_path / "kept")}, resume=resume))
    assert (chosen.folder, chosen.start_from) == (tmp_path / "kept", Path("/kept/global_step_3"))
    assert chosen.folder.is_dir()
