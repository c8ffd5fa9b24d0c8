"""The JSON schema of an experiment file, and what it says about a path, for error messages and the reference page."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from nexrl.spec.choices import Node, specialised
from nexrl.spec.experiment import API_VERSION, Experiment
from nexrl.spec.section import CODE, PATH


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of an experiment file, for editors and for generating documentation.

    The keys of all variants of a section are in `properties`. `x-choices` tells which variant has which.
    """
    schema = Experiment.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://{API_VERSION}/experiment.json",
        **_with_all_keys(schema),
    }


def _with_all_keys(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_all_keys(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    merged = {key: _with_all_keys(value) for key, value in schema.items()}
    return {**merged, "properties": all_keys(merged)} if "x-choices" in merged else merged


class SchemaView:
    """Looks things up in the schema by the path of a key in a document."""

    def __init__(self) -> None:
        self._schema = Experiment.model_json_schema(by_alias=True)

    def at(self, path: Sequence[str | int], document: object) -> Node:
        """The node of a path; `document` chooses the variants of sections. Empty if the path leads nowhere.

        A section that is not in the document has the keys of all its variants.
        """
        node: Node = self._schema
        for part in path:
            node = self._child(self._chosen(node, document), part)
            document = value_at(document, part)
        return self._chosen(node, document)

    def section(self, path: Sequence[str | int], document: object) -> Node:
        """The node of a path before its own variant is chosen: with `x-choices` and the keys of all variants."""
        *parents, key = path
        return self.resolve(self._child(self.at(parents, document), key))

    def resolve(self, node: Node) -> Node:
        """Follows references, and drops `or none`."""
        while (target := self._target(node)) is not None:
            # What is written beside a reference describes the key: it precedes what the section says of itself.
            beside = {key: value for key, value in node.items() if key not in _REFERENCES}
            node = {**target, **beside, "about": target.get("about", target.get("description", ""))}
        return node

    def sections(self, document: object) -> Iterator[tuple[list[str], Node]]:
        """Path and node of every mapping in the document for which the schema has a section, outermost first."""
        pending: list[list[str]] = [[]]
        while pending:
            path = pending.pop()
            node = self.section(path, document) if path else self._schema
            yield path, node
            for key, child in self._chosen(node, _value(document, path))["properties"].items():
                if isinstance(_value(document, [*path, key]), Mapping) and "properties" in self.resolve(child):
                    pending.append([*path, key])

    def allowed(self, node: Node) -> str:
        """What a value at this node may be, in words: type, bounds, choices."""
        node = self.resolve(node)
        if "x-names" in node:
            return f"one of {', '.join(node['x-names'])}, or `module:name` of yours"
        if CODE in node:
            return "`module:name` of yours, or of any installed module"
        if PATH.key in node:
            return "a path" + _bounds(node, "minLength", "maxLength", " characters")
        if "enum" in node or "const" in node:
            return _choices(node.get("enum", [node.get("const")]))
        if node.get("type") == "array":
            bounds = _bounds(node, "minItems", "maxItems", " long")
            return f"a list{bounds}{bounds and ','} of {self.allowed(node['items'])}"
        words = _SCALARS.get(node.get("type", ""), "any value")
        if "properties" in node:
            words += f" with the keys {', '.join(all_keys(node))}"
        if "pattern" in node:
            words += f" matching `{node['pattern']}`"
        return words + _bounds(node, "minimum", "maximum") + _bounds(node, "minLength", "maxLength", " characters")

    def _chosen(self, node: Node, section: object) -> Node:
        node = self.resolve(node)
        if "x-choices" not in node:
            return node
        return {**node, "properties": all_keys(node)} if section is None else specialised(node, section)

    def _target(self, node: Node) -> Node | None:
        if "$ref" in node:
            definition: Node = self._schema["$defs"][node["$ref"].rpartition("/")[2]]
            return definition
        if "anyOf" in node:
            option: Node = next(option for option in node["anyOf"] if option.get("type") != "null")
            return option
        return None

    def _child(self, node: Node, part: str | int) -> Node:
        if isinstance(part, int):
            return dict(node.get("items", {}))
        others = node.get("additionalProperties")
        return dict(node.get("properties", {}).get(part) or (others if isinstance(others, Mapping) else {}))


@cache
def schema_view() -> SchemaView:
    """The view of the schema, made once."""
    return SchemaView()


_REFERENCES = frozenset({"$ref", "anyOf"})
_SCALARS = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a mapping",
}


def all_keys(node: Node) -> dict[str, Node]:
    """The keys of a section with those of all its variants; a key that several variants have is the first one's."""
    keys: dict[str, Node] = {**node["properties"]}
    for choice in node.get("x-choices", []):
        for variant in choice["variants"]:
            for key, child in variant["properties"].items():
                keys.setdefault(key, child)
    return keys


def value_at(document: object, part: str | int) -> Any:
    """What a document has at one part of a path; None if there is nothing."""
    if isinstance(document, Mapping):
        return document.get(part)
    if isinstance(document, list) and isinstance(part, int) and part < len(document):
        return document[part]
    return None


def _value(document: object, path: Sequence[str | int]) -> Any:
    for part in path:
        document = value_at(document, part)
    return document


def _choices(values: Sequence[object]) -> str:
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
