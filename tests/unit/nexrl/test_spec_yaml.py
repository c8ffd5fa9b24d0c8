"""The YAML of experiment files: what is written is read back, and plain scalars have the types of YAML 1.2."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nexrl.spec import Experiment, dump_resolved, load_experiment, load_resolved, validate_file
from nexrl.spec.yaml_core import dump, load


@given(prompt=st.text(max_size=40), name=st.from_regex(r"[a-z][a-z0-9]{0,20}", fullmatch=True))
def test_dumping_and_loading_keeps_any_text(prompt: str, name: str) -> None:
    document = {
        "apiVersion": "nexrl.dev/v1alpha1",
        "kind": "Experiment",
        "metadata": {"name": "minimal", "annotations": {name: prompt}},
        "spec": {
            "model": {"path": "x"},
            "data": {"type": "mock"},
            "trainer": {"steps": 3},
            "rollout": {"chat": True, "systemPrompt": prompt},
        },
    }
    experiment = Experiment.model_validate_json(json.dumps(document))
    assert Experiment.model_validate_json(json.dumps(load(dump_resolved(experiment)))) == experiment


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)


@given(value=json_values)
def test_yaml_that_is_written_is_read_back(value: object) -> None:
    assert load(dump(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), ("-.5", -0.5), ("7", 7), ("no", "no"), ("true", True), ("2026-11-21", "2026-11-21"),
     ("010", "010"), ("1:30", "1:30"), ("~", None), ("e5", "e5"), ("1_000", "1_000")],
)  # fmt: skip
def test_plain_scalars_have_the_types_of_yaml_1_2(text: str, value: object) -> None:
    read = load(text)
    assert (read, type(read)) == (value, type(value))


def write(path: Path, data: dict[str, str], model: dict[str, object]) -> Path:
    spec = {"model": model, "data": data, "trainer": {"steps": 3}, "rollout": {"maxNewTokens": 8}}
    head = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "minimal"}}
    path.write_text(yaml.safe_dump({**head, "spec": spec}))
    return path


def test_the_resolved_file_is_the_same_experiment_from_any_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "experiment.yaml", {"type": "mock"}, {"scratch": {"alphabet": "0123456789"}})
    # A null where the default is a number means "no limit".
    loaded = load_experiment(path, ["algorithm.learningRate=1e-5", "startupDeadlineSeconds=null"])
    elsewhere = tmp_path / "run" / "experiment.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(dump_resolved(loaded))
    assert load_resolved(elsewhere) == loaded
    assert load_experiment(elsewhere) == loaded
    assert load_resolved(elsewhere).folder == tmp_path


def test_a_resolved_file_is_read_without_its_data(tmp_path: Path) -> None:
    path = write(tmp_path / "resolved.yaml", {"type": "jsonl", "path": "/nowhere.jsonl"}, {"path": "/nowhere"})
    assert load_resolved(path).spec.model.path == "/nowhere"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spec:\n  model: [1, 2\n  data: {}\n", "line 3"),
        ("kind: Experiment\nkind: Experiment\n", "line 2: not valid YAML: key 'kind' occurs twice"),
        ("- 1\n", "a mapping"),
        ("", "a mapping"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("a: &a [*a]\n", "Circular"),
        ("? [1]\n: 2\n", "a key must be text"),
        ("a: \x00\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    (violation,) = validate_file(path)
    assert words in str(violation)
