"""What pydantic refuses, in words: the field's path in the file, its value, what is allowed."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from nexrl.errors import InvalidArgumentError, Violation
from nexrl.spec.choices import Node, foreign_keys, wrong_tags
from nexrl.spec.schema import SchemaView, all_keys, schema_view, value_at

SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=password=)[^&\s\"]+")
"""Secrets that a URL may contain. No message repeats them."""

_Path = list[str | int]


class SpecError(InvalidArgumentError):
    """An experiment that cannot run. Each of `violations` is a path in the file, the value, and what is allowed."""


def spec_error(path: Path, violations: Sequence[Violation]) -> SpecError:
    """The error that lists all that is wrong with the file at `path`."""
    counted = "1 problem" if len(violations) == 1 else f"{len(violations)} problems"
    lines = "".join(f"\n  {violation}" for violation in violations)
    return SpecError(f"{path}: {counted}{lines}", violations=violations)


def violations_of(error: ValidationError, document: Mapping[str, object]) -> list[Violation]:
    """All problems that validating `document` has found, one for each field."""
    view = schema_view()
    found = [(path_in_file(details, document), details) for details in error.errors()]
    kept = [(path, details) for path, details in found if not _follows_from_a_wrong_tag(path, document, view)]
    return _outermost_last([_violation(path, details, document, view) for path, details in kept])


def path_in_file(details: ErrorDetails, document: object) -> _Path:
    """The path of an error in the file: pydantic's, without the names of variants that it puts after sections."""
    view, path = schema_view(), _Path()
    parts = list(details["loc"])
    while parts:
        path.append(parts.pop(0))
        if parts and "x-choices" in view.section(path, document):
            parts.pop(0)
    if details["type"] == "rule" and path and isinstance(path[-1], str):
        path[-1] = to_camel(path[-1])  # pydantic names a default that breaks a rule as Python does
    return path


def _follows_from_a_wrong_tag(path: _Path, document: Mapping[str, object], view: SchemaView) -> bool:
    """True for keys that only some variants have, in a section that chooses none: what applies to them is unknown."""
    for end in range(1, len(path)):
        node = view.section(path[:end], document)
        is_wrong = any(wrong_tags(node, _at(document, path[:end])))
        if is_wrong and path[end] not in node["properties"] and path[end] in all_keys(node):
            return True
    return False


def _at(document: object, path: _Path) -> object:
    for part in path:
        document = value_at(document, part)
    return document


def _outermost_last(violations: Sequence[Violation]) -> list[Violation]:
    """Drops a problem of a list that only repeats the problems of its items."""
    fields = [violation.field for violation in violations]
    return [one for one in violations if not any(field.startswith(f"{one.field}[") for field in fields)]


def _violation(path: _Path, details: ErrorDetails, document: Mapping[str, object], view: SchemaView) -> Violation:
    match details["type"]:
        case "extra_forbidden":
            return Violation(dotted(path), _unknown_key(path, details["input"], document, view))
        case "rule":
            about = details.get("ctx", {})
            keys, value = ([about["key"]], about["value"]) if "key" in about else ([], details["input"])
            return Violation(dotted([*path, *keys]), f"{shown(value)} is not allowed: {details['msg']}")
        case "missing":
            return _missing(path, document, view)
        case _:
            allowed = view.allowed(view.at(path, document))
            return Violation(dotted(path), f"{shown(details['input'])} is not allowed; allowed: {allowed}")


def _missing(path: _Path, document: Mapping[str, object], view: SchemaView) -> Violation:
    *parents, _ = path
    if parents and "" in wrong_tags(node := view.section(parents, document), _at(document, parents)):
        return Violation(dotted(parents), _exactly_one(node))
    return Violation(dotted(path), f"missing; allowed: {view.allowed(view.at(path, document))}")


def _unknown_key(path: _Path, value: object, document: Mapping[str, object], view: SchemaView) -> str:
    *parents, key = path
    node = view.section(parents, document) if parents else {}
    foreign = foreign_keys(node, _at(document, parents)) if "x-choices" in node else {}
    if key in foreign:
        why = _exactly_one(node) if key in _choosing_keys(node) else foreign[str(key)]
        return f"{shown(value)} is not allowed: {why}"
    chosen = view.at(parents, document)
    known = list(chosen.get("properties", {}))
    missing = [name for name in chosen.get("required", []) if _at(document, [*parents, name]) is None]
    # A required key that is missing was probably meant, even if another key is more similar.
    near = _similar(key, missing) or _similar(key, known)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known here: {', '.join(known)}"


def _similar(key: str | int, names: Sequence[str]) -> list[str]:
    """The most similar name; empty if none is similar."""
    return difflib.get_close_matches(to_camel(str(key)), names, n=1)


def _exactly_one(node: Node) -> str:
    return f"give exactly one of {' and '.join(_choosing_keys(node))}"


def _choosing_keys(node: Node) -> list[str]:
    """The keys of a section without tags whose presence chooses the variant."""
    return [one["value"] for choice in node["x-choices"] if not choice["tag"] for one in choice["variants"]]


def dotted(path: Sequence[str | int]) -> str:
    """A path as messages write it: `spec.algorithm.betas[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def shown(value: object) -> str:
    """A value as messages show it: short, and without secrets."""
    text = SECRET.sub("...", json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."
