"""The experiment file: which teachers, reference models and preference losses are refused, and with which message."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nexrl.spec import validate_file


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"algorithm": {"advantage": "distillation"}}, "spec.algorithm.teacher", ["missing", "distillation needs it"]),
        ({"algorithm": {"teacher": {"path": "nowhere"}}}, "spec.algorithm.teacher.path", ["nowhere does not exist"]),
        (
            {"algorithm": {"loss": "dpo", "teacher": {"path": "package:nexrl"}}},
            "spec.algorithm.teacher",
            ["does not use advantages"],
        ),
        (
            {"algorithm": {"loss": "dpo", "miniBatches": 2}},
            "spec.algorithm.miniBatches",
            ["2", "both samples of a pair"],
        ),
        ({"algorithm": {"loss": "dpo", "correction": {"vetoRatio": 0.1}}}, "spec.algorithm.correction", ["remove it"]),
        ({"algorithm": {"type": "ppo", "loss": "dpo"}}, "spec.algorithm.loss", ["the critic has no effect"]),
        (
            {"algorithm": {"type": "ppo", "teacher": {"path": "package:nexrl"}}},
            "spec.algorithm.teacher",
            ["from the critic; remove it"],
        ),
        (
            {"algorithm": {"type": "ppo", "zeroVarianceGroups": "refill"}},
            "spec.algorithm.zeroVarianceGroups",
            ["compares no samples"],
        ),
        (
            {"algorithm": {"type": "ppo", "criticOnlySteps": 4}, "trainer": {"steps": 4}},
            "spec.algorithm.criticOnlySteps",
            ["4", "must be below trainer.steps"],
        ),
        ({"algorithm": {"type": "ppo", "advantage": "rloo"}}, "spec.algorithm.advantage", ["only type grpo has"]),
        ({"algorithm": {"gaeLambda": 0.9}}, "spec.algorithm.gaeLambda", ["only type ppo has"]),
        ({"algorithm": {"loss": "dpo", "labelSmoothing": 0.5}}, "spec.algorithm.labelSmoothing", ["0.5", "below 0.5"]),
        (
            {"algorithm": {"reference": {"type": "average", "decay": 0.9}}},
            "spec.algorithm.reference",
            ["klCoefficient above 0, or loss dpo"],
        ),
        (
            {"algorithm": {"klCoefficient": 0.1, "reference": {"type": "average", "decay": 0.9, "everySteps": 3}}},
            "spec.algorithm.reference.everySteps",
            ["only type refreshed has"],
        ),
        (
            {
                "model": {"scratch": {"alphabet": "01"}, "lora": {"rank": 2, "alpha": 4}},
                "algorithm": {"klCoefficient": 0.1, "reference": {"type": "average", "decay": 0.9}},
            },
            "spec.algorithm.reference",
            ["with model.lora", "remove it"],
        ),
        ({"algorithm": {"teacher": {"path": "."}}}, "spec.algorithm.teacher.path", ["no config.json"]),
        (
            {"algorithm": {"processor": "external", "teacher": {"path": "package:nexrl"}}},
            "spec.algorithm.processor",
            ['"external"', "remove teacher"],
        ),
    ],
)
def test_one_mistake_gives_one_message_at_its_path(
    tmp_path: Path, sections: dict[str, Any], field: str, words: list[str]
) -> None:
    spec = {"model": {"scratch": {"alphabet": "01"}}, "data": {"type": "mock"}, "trainer": {"steps": 3}, **sections}
    spec["rollout"] = {"maxNewTokens": 8}
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "minimal"}, "spec": spec}
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(document))
    (found,) = validate_file(path, ())
    assert found.field == field
    assert all(word in found.description for word in words), found
