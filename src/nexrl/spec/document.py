"""The document of an experiment file before it is validated: YAML, overrides, absolute paths."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nexrl.errors import Violation
from nexrl.spec import yaml_core
from nexrl.spec.choices import without_foreign_defaults
from nexrl.spec.marks import marked_values
from nexrl.spec.schema import schema_view
from nexrl.spec.section import PATH
from nexrl.spec.violations import dotted, spec_error

MAX_FILE_BYTES = 2**20  # what a cluster's store takes as one object

_ROOT_KEYS = ("apiVersion", "kind", "metadata")
_REMOVED_KEYS = ("url", "apiKeyEnv")
"""Keys of `spec.inference` that no longer exist. Null was their default, and is still accepted."""


def read_document(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the document at `path` with these overrides, not validated. Raises SpecError."""
    document = read_yaml(path)
    if violations := apply_overrides(overrides, document):
        raise spec_error(path, violations)
    return document


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in the YAML file at `path`. Raises SpecError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise spec_error(path, [Violation(str(path), f"cannot be read: {error.strerror}")]) from error
    if len(content) > MAX_FILE_BYTES:
        raise spec_error(path, [Violation(str(path), f"{len(content)} bytes; at most {MAX_FILE_BYTES}")])
    try:
        document = yaml_core.load(content)
        json.dumps(document)  # fails for an anchor that contains itself
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise spec_error(path, [Violation(f"{path}{line}", f"not valid YAML: {error.problem}")]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise spec_error(path, [Violation(str(path), f"not valid YAML: {error}")]) from error
    if not isinstance(document, dict):
        raise spec_error(
            path, [Violation(str(path), "a mapping with the keys apiVersion, kind, metadata, spec is needed")]
        )
    return document


def apply_overrides(overrides: Sequence[str], document: dict[str, Any]) -> list[Violation]:
    """Writes overrides, each `KEY=VALUE`, into the document. Whether their keys exist is checked with the rest."""
    violations = []
    for override in overrides:
        try:
            _apply(override, document)
        except ValueError as error:
            violations.append(Violation(f"override {override}", str(error)))
    return violations


def _apply(override: str, document: dict[str, Any]) -> None:
    key, equals, value = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ValueError("must be KEY=VALUE, such as algorithm.learningRate=1e-3")
    if parts[0] == "spec":
        raise ValueError(f"keys are relative to spec: write {key.removeprefix('spec.')}={value}")
    if parts[0] not in _ROOT_KEYS:
        parts = ["spec", *parts]
    try:
        parsed = yaml_core.load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{value!r} is not valid YAML") from error
    section = document
    for part in parts[:-1]:
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ValueError(f"{part} has no keys")
    section[parts[-1]] = parsed


def make_absolute(document: Mapping[str, Any], folder: Path) -> list[Violation]:
    """Makes the document's relative paths start at `folder`. Paths that cannot be resolved are violations."""
    violations = []
    for path, section, key, _ in marked_values(PATH.key, document):
        value = section[key]
        if isinstance(value, str) and value and not value.startswith("package:"):
            try:
                section[key] = os.path.normpath(folder / Path(value).expanduser())
            except RuntimeError:  # "~bob", a user that this machine does not know
                violations.append(Violation(dotted(path), f"{value}: no such home folder on this machine"))
    return violations


def drop_foreign_defaults(document: dict[str, Any]) -> None:
    """Removes keys of variants that the document does not choose, see `without_foreign_defaults`."""
    for path, node in list(schema_view().sections(document)):
        if "x-choices" in node:
            section: Any = document
            for part in path:
                section = section[part]
            kept = without_foreign_defaults(node, section)
            for key in section.keys() - kept.keys():
                del section[key]


def drop_removed_keys(document: Mapping[str, Any]) -> None:
    """Removes keys that no longer exist, if their value is null."""
    spec = document.get("spec")
    inference = spec.get("inference") if isinstance(spec, dict) else None
    if isinstance(inference, dict):
        for key in _REMOVED_KEYS:
            if inference.get(key, "") is None:
                del inference[key]
