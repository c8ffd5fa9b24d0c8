"""The backends that can be started are those that the experiment file allows."""

from collections.abc import Iterator, Mapping
from typing import Any

from nexrl.spec import ExperimentSpec
from nexrl_inference.server import BACKENDS


def variants(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The object schemas that `node` allows."""
    if "$ref" in node:
        yield from variants(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    for alternatives in ("anyOf", "oneOf", "allOf"):
        for alternative in node.get(alternatives, ()):
            yield from variants(schema, alternative)
    if "properties" in node:
        yield node


def test_each_backend_of_the_experiment_file_can_be_started_and_no_other() -> None:
    schema = ExperimentSpec.model_json_schema()
    backends = [variant["properties"]["backend"] for variant in variants(schema, schema["properties"]["inference"])]
    allowed = [name for backend in backends for name in backend.get("enum", [backend.get("const")])]
    assert sorted(allowed) == sorted(BACKENDS)
