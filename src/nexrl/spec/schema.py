"""The JSON schema of an experiment file, and what it says about a path, for error messages and the reference page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nexrl.spec.experiment import API_VERSION, Experiment

Node = Mapping[str, Any]
"""One (sub)schema, its reference followed."""


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of an experiment file, for editors and for generating documentation."""
    schema = Experiment.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://{API_VERSION}/experiment.json",
        **schema,
    }


class SchemaView:
    """Looks things up in the schema by the path of a key in a document."""

    def __init__(self) -> None:
        self._schema = json_schema()

    def at(self, path: Sequence[str | int], document: object) -> Node:
        """The node of a path; `document` decides between the variants of a union. Empty if the path leads nowhere."""
        node: Node = self._schema
        for part in path:
            node = self._child(self.resolve(node, document), part)
            document = _value_at(document, part)
        return self.resolve(node, document)

    def resolve(self, node: Node, document: object = None) -> Node:
        """Follows a reference, drops `or none`, and chooses a union's variant by the `type` in the document, if any."""
        while (target := self._target(node, document)) is not None:
            # What is written beside a reference is about the key: it goes before what the section says of itself.
            beside = {key: value for key, value in node.items() if key not in _REFERENCES}
            node = {**target, **beside, "about": target.get("about", target.get("description", ""))}
        return node

    def variants(self, node: Node) -> Iterator[Node]:
        """The variants of a union."""
        return (self._definition(reference) for reference in node["discriminator"]["mapping"].values())

    def allowed(self, node: Node) -> str:
        """What a value at this node may be, in words: type, bounds, choices."""
        node = self.resolve(node)
        if "oneOf" in node:
            return f"a mapping with type: {_choices(node['discriminator']['mapping'])}"
        if "enum" in node or "const" in node:
            return _choices(node.get("enum", [node.get("const")]))
        if node.get("type") == "array":
            bounds = _bounds(node, "minItems", "maxItems", " long")
            return f"a list{bounds}{bounds and ','} of {self.allowed(node['items'])}"
        words = _SCALARS.get(node.get("type", ""), "any value")
        if "properties" in node:
            words += f" with the keys {', '.join(node['properties'])}"
        if "pattern" in node:
            words += f" matching `{node['pattern']}`"
        return words + _bounds(node, "minimum", "maximum") + _bounds(node, "minLength", "maxLength", " characters")

    def _target(self, node: Node, document: object) -> Node | None:
        if "$ref" in node:
            return self._definition(node["$ref"])
        if "anyOf" in node:
            option: Node = next(option for option in node["anyOf"] if option.get("type") != "null")
            return option
        if "oneOf" in node:
            chosen = node["discriminator"]["mapping"].get(_value_at(document, "type"))
            return self._definition(chosen) if chosen is not None else None
        return None

    def _child(self, node: Node, part: str | int) -> Node:
        if isinstance(part, int):
            return dict(node.get("items", {}))
        if "oneOf" in node and part == "type":
            return {"enum": list(node["discriminator"]["mapping"])}
        others = node.get("additionalProperties")
        return dict(node.get("properties", {}).get(part) or (others if isinstance(others, Mapping) else {}))

    def _definition(self, reference: str) -> Node:
        definition: Node = self._schema["$defs"][reference.rpartition("/")[2]]
        return definition


_REFERENCES = frozenset({"$ref", "anyOf", "oneOf", "discriminator"})
_SCALARS = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a mapping",
}


def _value_at(document: object, part: str | int) -> Any:
    if isinstance(document, Mapping):
        return document.get(part)
    if isinstance(document, list) and isinstance(part, int) and part < len(document):
        return document[part]
    return None


def _choices(values: Sequence[object] | Mapping[str, object]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _bounds(node: Node, minimum: str, maximum: str, unit: str = "") -> str:
    """Bounds in words: `, 1 to 10`, `, above 0`."""
    low, high = node.get(minimum), node.get(maximum)
    if low is not None and high is not None:
        return f", {_number(low)}{unit}" if low == high else f", {_number(low)} to {_number(high)}{unit}"
    limits = {
        "at least": low,
        "above": node.get(f"exclusive{minimum.capitalize()}"),
        "at most": high,
        "below": node.get(f"exclusive{maximum.capitalize()}"),
    }
    words = " and ".join(f"{word} {_number(limit)}" for word, limit in limits.items() if limit is not None)
    return f", {words}{unit}" if words else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)
