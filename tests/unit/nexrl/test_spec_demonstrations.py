"""The experiment file: what supervised fine-tuning requires, and how it is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nexrl.spec import validate_file

SUPERVISED: dict[str, Any] = {
    "model": {"scratch": {"alphabet": "01"}},
    "data": {"type": "mock"},
    "rollout": {"type": "demonstrations", "maxNewTokens": 8},
    "trajectoryPool": {"groupSize": 1},
    "algorithm": {"loss": "cross_entropy"},
    "trainer": {"steps": 3},
}


def problems(folder: Path, **sections: dict[str, Any]) -> list[Any]:
    """What is wrong with the experiment when these keys are changed."""
    spec = SUPERVISED | {name: {**SUPERVISED.get(name, {}), **keys} for name, keys in sections.items()}
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "sft"}, "spec": spec}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(document))
    return list(validate_file(path, ()))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"weightSync": {"mode": "batch-async"}},
        {"algorithm": {"loss": "cross_entropy", "klCoefficient": 0.1}},
        {"algorithm": {"loss": "mine:loss", "processor": "mine:Processor"}},
        {"algorithm": {"loss": "mine:loss", "zeroVarianceGroups": "keep"}},
    ],
)
def test_supervised_fine_tuning_needs_no_advantage_and_no_further_keys(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from nexrl.algorithm import Processor as Base\n\n\nclass Processor(Base):\n    def fit(self, batch): ...\n\n\n"
        "def loss(inputs): ...\n"
    )
    assert problems(tmp_path, **sections) == []


@pytest.mark.parametrize(
    ("section", "keys", "field", "words"),
    [
        ("rollout", {"temperature": 0.5}, "temperature", "0.5 is not allowed: demonstrations are not sampled"),
        ("rollout", {"topP": 0.5}, "topP", "use 1"),
        ("rollout", {"topK": 5}, "topK", "use 0"),
        ("trajectoryPool", {"groupSize": 4}, "groupSize", "4 is not allowed: a task has one demonstration"),
        ("algorithm", {"loss": "ppo_clip"}, "loss", "use cross_entropy"),
        ("algorithm", {"loss": "dpo"}, "loss", "use cross_entropy"),
        ("algorithm", {"advantage": "rloo"}, "advantage", "have no rewards; remove it"),
        ("algorithm", {"correction": {"vetoRatio": 0.1}}, "correction", "have no ratio; remove it"),
        ("algorithm", {"klCoefficient": 0.1, "klEstimator": "k3_unbiased"}, "klEstimator", "use k2 or k3"),
        ("algorithm", {"klRewardCoefficient": 0.1}, "klRewardCoefficient", "no reward is trained"),
        ("algorithm", {"overlongPenalty": {"afterTokens": 1, "fullTokens": 2}}, "overlongPenalty", "no reward"),
        ("weightSync", {"mode": "fully-async"}, "mode", "use sync or batch-async"),
    ],
)
def test_what_has_no_meaning_for_demonstrations_is_refused_at_its_key(
    tmp_path: Path, section: str, keys: dict[str, Any], field: str, words: str
) -> None:
    (found,) = problems(tmp_path, **{section: keys})
    assert found.field == f"spec.{section}.{field}"
    assert words in found.description


def test_a_loss_of_ones_own_must_keep_samples_that_are_compared_with_no_other(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(inputs): ...\n")
    (found,) = problems(tmp_path, algorithm={"loss": "mine:loss"})
    assert (found.field, "use keep" in found.description) == ("spec.algorithm.zeroVarianceGroups", True)


def test_a_teacher_judges_no_demonstrations(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(inputs): ...\n")
    keys = {"loss": "mine:loss", "zeroVarianceGroups": "keep", "teacher": {"path": "package:nexrl"}}
    (found,) = problems(tmp_path, algorithm=keys)
    assert found.field == "spec.algorithm.teacher"


@pytest.mark.parametrize("sampler", [{"type": "difficulty"}, {"type": "python", "function": "mine:weights"}])
def test_a_sampler_finds_no_rewards_of_demonstrations(tmp_path: Path, sampler: dict[str, Any]) -> None:
    found = problems(tmp_path, data={"sampler": sampler})
    assert ("spec.rollout.type", True) in [(each.field, "data.sampler chooses" in each.description) for each in found]


def test_a_file_without_answers_has_no_demonstrations(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "0"}\n')
    (found,) = problems(tmp_path, data={"type": "jsonl", "path": "tasks.jsonl", "answerField": ""})
    assert (found.field, "data.answerField is empty" in found.description) == ("spec.rollout.type", True)
