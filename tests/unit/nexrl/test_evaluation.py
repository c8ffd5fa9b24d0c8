"""What `nexrl eval` makes of an experiment and its options, and how it reports samples that were not scored."""

import json
from pathlib import Path

import pytest

from nexrl.errors import AlreadyExistsError, InvalidArgumentError, TrainingFailedError
from nexrl.local.evaluation import EvaluationOptions, Measurement, evaluation_of, write_results
from nexrl.local.run_folder import RunFolder
from nexrl.spec import SpecError
from nexrl.spec.trainer import NoResume, ResumeFromPath
from tests.support.runs import copy_experiment


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of an experiment that can run."""
    return copy_experiment(tmp_path)


def folder(parent: Path, name: str, *files: str) -> Path:
    """Make a folder with empty JSON files."""
    made = parent / name
    made.mkdir()
    for each in files:
        (made / each).write_text("{}")
    return made


def test_the_evaluated_experiment_grants_no_training_sample_and_is_not_validated_by_the_controller(file: Path) -> None:
    changed = ["resume.mode=auto", "checkpoint.path=kept", "validation.timeoutSeconds=9000", "validation.everySteps=5"]
    experiment = evaluation_of(file, changed, EvaluationOptions())
    spec = experiment.spec
    assert experiment.metadata.name == "copy-digits-eval"
    assert (spec.trainer.steps, spec.checkpoint.path, type(spec.resume)) == (0, None, NoResume)
    assert spec.validation is not None
    assert (spec.validation.before_training, spec.validation.every_steps) == (False, 0)
    assert spec.monitor.health.stall_deadline_seconds > 9000


def test_the_weights_are_those_of_the_checkpoint_or_of_the_hugging_face_folder(file: Path, tmp_path: Path) -> None:
    checkpoint, model = folder(tmp_path, "a: b", "checkpoint.json"), folder(tmp_path, "hf", "config.json")
    resumed = evaluation_of(file, [], EvaluationOptions(checkpoint=checkpoint, out=tmp_path / "measured"))
    assert resumed.metadata.name == "measured"
    assert isinstance(resumed.spec.resume, ResumeFromPath)
    assert resumed.spec.resume.path == str(checkpoint)
    loaded = evaluation_of(file, ["model.seed=3"], EvaluationOptions(hf=model))
    assert (loaded.spec.model.path, loaded.spec.model.scratch) == (str(model), None)


def test_options_that_cannot_be_followed_are_refused_by_name(tmp_path: Path) -> None:
    model = folder(tmp_path, "hf", "config.json")
    with pytest.raises(InvalidArgumentError, match="give one of them"):
        EvaluationOptions(checkpoint=model, hf=model)
    with pytest.raises(InvalidArgumentError, match=r"checkpoint: .* is no complete checkpoint"):
        EvaluationOptions(checkpoint=model)
    with pytest.raises(InvalidArgumentError, match=r"hf: .* is no Hugging Face model"):
        EvaluationOptions(hf=tmp_path / "none")
    with pytest.raises(AlreadyExistsError, match="choose another folder"):
        EvaluationOptions(out=model)


def test_an_experiment_without_validation_is_refused(file: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"spec\.validation: missing"):
        evaluation_of(file, ["validation=null"], EvaluationOptions())
    with pytest.raises(SpecError, match=r"metadata\.name"):
        evaluation_of(file, [], EvaluationOptions(out=Path("No_Name")))


def test_an_evaluation_without_a_scored_sample_fails_with_the_reasons(file: Path, tmp_path: Path) -> None:
    experiment = evaluation_of(file, [], EvaluationOptions())
    run = RunFolder(tmp_path, experiment)
    measured = Measurement(experiment, run.path)
    measured.samples, measured.failures, measured.tasks = [], {"reward_error": 16}, 16
    with pytest.raises(TrainingFailedError, match="no sample was scored: 16 reward_error"):
        write_results(run, experiment, measured, seconds=1)
    results = json.loads((run.path / "eval.json").read_text())
    assert (results["tasks"], results["failed_samples"], results["scores"]) == (16, 16, {})
    run.close()
