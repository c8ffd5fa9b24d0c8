"""The YAML of experiment files: what is written is read back, and plain scalars have the types of YAML 1.2."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.spec import Experiment, dump_resolved
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
