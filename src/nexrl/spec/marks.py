"""Finds the fields that carry a mark, see `nexrl.spec.section`."""

from collections.abc import Iterator, Mapping
from typing import Any

from nexrl.spec.choices import Node, specialised, wrong_tags
from nexrl.spec.schema import SchemaView, all_keys, schema_view
from nexrl.spec.section import MAY_CHANGE, Mark

_Marked = tuple[list[str], dict[str, Any], str, Any]


def marked_values(mark: str, document: Mapping[str, Any]) -> Iterator[_Marked]:
    """Each value in the document whose field has a mark with the key `mark`.

    Yields its path, the mapping that contains it, its key, and the value of the mark.

    The document may be wrong: a section that chooses no variant counts as having the keys of all.
    """
    yield from _values(mark, schema_view().at([], {}), document, [])


def _values(mark: str, node: Node, section: Any, path: list[str]) -> Iterator[_Marked]:
    view = schema_view()
    known = all_keys(node) if any(wrong_tags(node, section)) else specialised(node, section)["properties"]
    for key, child in known.items():
        if key not in section:
            continue
        resolved = view.resolve(child)
        if mark in resolved:
            yield [*path, key], section, key, resolved[mark]
        if "properties" in resolved and isinstance(section[key], dict):
            yield from _values(mark, resolved, section[key], [*path, key])


def may_change(*marks: Mark) -> list[str]:
    """Paths, relative to spec, of the fields with one of these marks of change: `rollout.replicas`."""
    values = {mark.value for mark in marks}
    return [path for path, value in _marks_of_change(schema_view()) if value in values]


def _marks_of_change(view: SchemaView) -> Iterator[tuple[str, str]]:
    pending = [("", view.resolve(view.at(["spec"], {})))]
    while pending:
        path, node = pending.pop(0)
        for key, child in all_keys(node).items():
            resolved, inner = view.resolve(child), f"{path}.{key}".lstrip(".")
            if MAY_CHANGE in resolved:
                yield inner, resolved[MAY_CHANGE]
            elif "properties" in resolved:
                pending.append((inner, resolved))
