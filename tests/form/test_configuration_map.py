"""Every configuration key of the developer guide has its place in the experiment file, and its values are accepted."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nexrl.spec import Experiment
from nexrl.spec.schema import SchemaView

PAGE = Path(__file__).parents[2] / "docs/reference/configuration-map.md"
MINIMAL: dict[str, Any] = {
    "apiVersion": "nexrl.dev/v1alpha1",
    "kind": "Experiment",
    "metadata": {"name": "minimal"},
    "spec": {"model": {"path": "x"}, "data": {"type": "mock"}, "trainer": {"steps": 3}},
}

# What the guide allows, in the new words, as sections of spec: the first key of each is the one that the row is about.
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "Q2": [{"project": "sums"}],
    "Q3": [{"metadata.name": "sums"}],
    "Q5": [{"data.type": "mock"}, {"data.type": "python", "data.factory": "tasks:torch_dataset"}],
    "Q6": [{"data.seed": 7}],
    "Q7": [
        {"data.type": "jsonl", "data.path": "x", "data.promptField": "q"},
        {"data.type": "parquet", "data.path": "x", "data.answerField": "a"},
        {"data.type": "reasoning_gym", "data.name": "chain_sum", "data.config": {"min_terms": 2}},
    ],
    "Q8": [{"rollout.type": kind} for kind in ("mock", "simple", "single_turn_math")],
    "Q9": [{"rollout.replicas": 2}, {"rollout.workers": 64}],
    "Q10": [{"trajectoryPool.type": "default"}],
    "Q11": [{"trajectoryPool.batchSize": 128}],
    "Q12": [{"trajectoryPool.groupSize": 16}],
    "Q13": [
        {
            "trajectoryPool.keyList": [],
            "algorithm.type": "mock",
        },  # every built-in advantage compares the samples of a group
        *({"trajectoryPool.keyList": keys} for keys in (["task_id"], ["level", "task_id"])),
    ],
    "Q14": [
        {"trajectoryPool.readiness": rule}
        for rule in (
            "batch_size",
            "loaded_batch_finished",
            "batch_size_reached",
            "batch_size_reached_and_loaded_batch_finished",
        )
    ],
    "Q15": [{"algorithm.type": "mock"}, {"algorithm.type": "grpo"}],
    "Q16": [{"trainBatchPool.type": "default"}],
    "Q17": [{"trajectoryPool.batchSize": 256}],
    "Q18": [{"trainer.type": "default"}],
    "Q19": [{"trainer.steps": 1000}],
    "Q20": [{"trainer.replicas": 2, "trainer.processesPerReplica": 2}],
    "Q21": [{"checkpoint.path": "kept"}],
    "Q22": [{"weightSync.path": "versions"}],
    "Q23": [{"checkpoint.everySteps": 10}, {"checkpoint.everySteps": 0}],
    "Q24": [{"checkpoint.keep": 2}],
    "Q25": [{"weightSync.type": "default"}],
    "Q26": [{"weightSync.mode": mode} for mode in ("sync", "fully-async", "batch-async")],
    "Q27": [{"weightSync.stalenessThreshold": 4, "weightSync.mode": "batch-async"}],
    "Q28": [{"trainer.backend": "mock"}, {"trainer.backend": "builtin"}],
    "Q30": [{"model.tag": "policy"}],
    "Q31": [{"metadata.name": "sums"}],
    "Q32": [{"inference.backend": "builtin"}, {"inference.backend": "vllm"}],
    "Q34": [{"model.tag": "policy"}],
    "Q36": [{"inference.maxRetries": 0}, {"inference.maxRetries": 5}],
    "Q38": [{"validation.beforeTraining": is_first} for is_first in (True, False)],
    "Q39": [{"validation.data": {"type": "jsonl", "path": "x"}}, {"validation.data": {"type": "mock", "seed": 1}}],
    "Q40": [{"validation.type": "default"}],
    "Q41": [
        {"resume.mode": "disable"},
        {"resume.mode": "auto"},
        {"resume.mode": "from_path", "resume.path": "global_step_3"},
    ],
    "Q42": [{"resume.path": "global_step_3", "resume.mode": "from_path"}],
    "Q43": [{"logger.backends": ["wandb"]}, {"logger.backends": ["console", "jsonl"]}],
    "Q44": [{"monitor.errors.enabled": is_on} for is_on in (True, False)],
    "Q46": [{"monitor.errors.policy": policy} for policy in ("stop_on_error", "continue", "stop_on_critical")],
    "Q47": [{"monitor.health.enabled": is_on} for is_on in (True, False)],
    "Q48": [{"monitor.health.checkIntervalSeconds": 10.0}],
    "Q49": [{"monitor.health.timeoutSeconds": 60.0}],
}


class Line(NamedTuple):
    """A line of the page's table."""

    row_id: str
    old: str
    here: str
    differs: str

    @property
    def keys(self) -> list[str]:
        """Keys of the experiment file, which stand before the colon; what follows it are values."""
        return re.findall(r"`([a-zA-Z.]+)`", self.here.partition(":")[0])

    @property
    def values(self) -> list[str]:
        return re.findall(r"`([\w-]+)`", self.here.partition(":")[2])


def lines() -> list[Line]:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [Line(*(cell.strip() for cell in line.split("|")[1:5])) for line in table if "`" in line or "Q" in line]


@cache
def schema() -> SchemaView:
    return SchemaView()


def node(key: str) -> dict[str, Any]:
    # A kind of data is chosen for its keys, but not for the key that chooses.
    document = {"spec": {"data": {} if key == "data.type" else {"type": "mock"}}}
    return dict(schema().at(path_of(key), document))


@pytest.mark.guide("Q4")
@pytest.mark.parametrize(
    "line", [line for line in lines() if line.row_id != "Q4"], ids=lambda line: line.row_id or line.old
)
def test_every_line_names_keys_that_exist_and_all_their_values_or_says_what_is_instead(line: Line) -> None:
    assert line.keys or line.differs
    assert [key for key in line.keys if not node(key)] == []
    if line.keys and line.values:
        allowed = node(line.keys[0])
        assert sorted(line.values) == sorted(allowed.get("items", allowed)["enum"])


def test_each_of_the_twelve_sections_has_its_place() -> None:
    sections = [line.old.strip("`") for line in lines() if not line.row_id]
    assert sections == [
        *("data", "rollout_worker", "trajectory_pool", "algorithm", "train_batch_pool", "train_worker"),
        *("weight", "service", "validate", "resume", "logger", "runtime_monitor"),
    ]


def test_the_page_has_all_rows_and_those_with_keys_are_tried_here() -> None:
    rows = {line.row_id: line for line in lines() if line.row_id}
    assert list(rows) == [f"Q{number}" for number in range(1, 51)]
    assert [row_id for row_id, line in rows.items() if line.keys and row_id != "Q4"] == list(ACCEPTED)


# Marked with no row: a key that is accepted proves nothing of what it does.
@pytest.mark.parametrize(
    ("row_id", "changes"),
    [
        pytest.param(row_id, changes, id=f"{row_id}-{number}")
        for row_id, accepted in ACCEPTED.items()
        for number, changes in enumerate(accepted)
    ],
)
def test_what_the_guide_allows_is_accepted_at_the_key_that_the_page_names(row_id: str, changes: dict[str, Any]) -> None:
    (line,) = (line for line in lines() if line.row_id == row_id)
    key, value = next(iter(changes.items()))
    assert key in line.keys or row_id == "Q7"  # its line speaks of all keys of data
    document = written({**({"validation.data": {"type": "mock"}} if "validation" in key else {}), **changes})
    experiment = Experiment.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    read = value_at(experiment.model_dump(mode="json", by_alias=True), key)
    if isinstance(value, dict):
        assert value.items() <= read.items()
    else:
        assert read == (value.replace("_reached", "") if key == "trajectoryPool.readiness" else value)


def written(changes: dict[str, Any]) -> dict[str, Any]:
    """MINIMAL with these values at these keys."""
    document = json.loads(json.dumps(MINIMAL))
    for key, value in changes.items():
        *sections, last = path_of(key)
        section = document
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return dict(document)


def value_at(document: Any, key: str) -> Any:
    for name in path_of(key):
        document = document[name]
    return document


def path_of(key: str) -> list[str]:
    return [*([] if key.startswith("metadata") else ["spec"]), *key.split(".")]
