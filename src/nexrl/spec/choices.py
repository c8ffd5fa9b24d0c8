"""What the choices of a section mean for its keys: nodes of the schema with `x-choices`, see `nexrl.spec.variants`."""

from collections.abc import Mapping
from typing import Any

from nexrl.spec.section import WRITTEN_OUT

Node = Mapping[str, Any]
"""One (sub)schema, its reference followed."""
OWN = "module:name"
"""How messages and documentation write the value of the user's variant."""


def specialised(node: Node, section: object) -> Node:
    """The node with the keys of the variants that `section` chooses, and of no others."""
    chosen = chosen_variants(node, section)
    properties = {**node["properties"]}
    for variant in chosen:
        properties |= variant["properties"]
    required = [*node.get("required", []), *(key for variant in chosen for key in variant["required"])]
    return {**node, "properties": properties, "required": required}


def chosen_variants(node: Node, section: object) -> list[Node]:
    """The variant of each choice that `section` makes; nothing for a choice that it makes wrongly."""
    given = section if isinstance(section, Mapping) else {}
    return [variant for choice in node.get("x-choices", []) if (variant := _chosen(node, choice, given)) is not None]


def wrong_tags(node: Node, section: object) -> list[str]:
    """The tags of a section whose value chooses no variant."""
    given = section if isinstance(section, Mapping) else {}
    return [choice["tag"] for choice in node.get("x-choices", []) if _chosen(node, choice, given) is None]


def foreign_keys(node: Node, section: object) -> dict[str, str]:
    """Return the keys of variants that `section` does not choose, each with a sentence that names its variants."""
    known = specialised(node, section)["properties"]
    return {
        key: f"only {described(choice['tag'], variants_with(choice, key))} has this key"
        for choice in node.get("x-choices", [])
        for variant in choice["variants"]
        for key in variant["properties"]
        if key not in known
    }


def variants_with(choice: Node, key: str) -> list[Node]:
    """The variants of a choice that have a key."""
    return [variant for variant in choice["variants"] if key in variant["properties"]]


def described(tag: str, variants: list[Node]) -> str:
    """Variants in words: `backend vllm`, or without a tag `a section with scratch`."""
    values = " or ".join(variant["value"] for variant in variants)
    return f"{tag} {values}" if tag else f"a section with {values}"


def without_foreign_defaults(node: Node, section: Mapping[str, Any]) -> dict[str, Any]:
    """The section without keys of other variants that have a default of the time when every variant had these keys.

    Stored objects contain them: an API server, or `dump_resolved`, has written them out.
    """
    foreign = foreign_keys(node, section)
    return {
        key: value
        for key, value in section.items()
        if key not in foreign or not any(_is_same(value, default) for default in written_out_of(node, key))
    }


def defaults_of(node: Node, key: str) -> list[Any]:
    """The defaults that the variants have for a key."""
    found = [
        variant["properties"][key]["default"]
        for choice in node.get("x-choices", [])
        for variant in variants_with(choice, key)
        if "default" in variant["properties"][key]
    ]
    return [value for number, value in enumerate(found) if value not in found[:number]]


def written_out_of(node: Node, key: str) -> list[Any]:
    """The defaults of a key at the time when every variant had it; empty if that was never so."""
    having = [variant for choice in node.get("x-choices", []) for variant in variants_with(choice, key)]
    return [default for variant in having for default in variant["properties"][key].get(WRITTEN_OUT, [])]


def _is_same(value: object, default: object) -> bool:
    """True for equal values of the same type. A stored 4.0 is read as 4."""
    return value == default and (type(value) is type(default) or (type(value) is int and type(default) is float))


def _chosen(node: Node, choice: Node, given: Mapping[str, Any]) -> Node | None:
    tag = choice["tag"]
    default = node["properties"][tag].get("default") if tag else None
    return next((one for one in choice["variants"] if is_chosen(one["value"], tag, given, default)), None)


def is_chosen(value: str, tag: str, given: Mapping[str, Any], default: object) -> bool:
    """True if a section chooses the variant of this value; `default` is the value of a tag that is not given."""
    if not tag:
        return given.get(value) is not None
    found = given.get(tag, default)
    return found == value or (value == OWN and isinstance(found, str) and ":" in found)
