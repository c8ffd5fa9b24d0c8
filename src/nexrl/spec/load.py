"""Reads an experiment: the document, the schema, and what this machine must have. One error lists all problems."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nexrl.errors import Violation
from nexrl.spec import yaml_core
from nexrl.spec.code import temporary_folder, with_folder
from nexrl.spec.document import apply_overrides, drop_foreign_defaults, drop_removed_keys, make_absolute, read_yaml
from nexrl.spec.experiment import FOLDER_ANNOTATION, Experiment
from nexrl.spec.section import written
from nexrl.spec.violations import SpecError, spec_error, violations_of


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads the experiment at `path` for a run on this machine.

    `overrides` are `KEY=VALUE`, such as `algorithm.learningRate=1e-3`: KEY relative to spec (or `metadata.…`), VALUE as
    in YAML.
    Relative paths become absolute, from the folder of the file. Raises SpecError.
    """
    from nexrl.spec.machine import missing_on_this_machine  # services do not need it, and it imports NumPy

    document = read_yaml(path)
    violations = apply_overrides(overrides, document)
    violations += make_absolute(document, path.resolve().parent)
    experiment, found = _parse(document)
    violations += found
    folder = temporary_folder(document) or path.resolve().parent
    if experiment is not None and (experiment.spec.code or FOLDER_ANNOTATION not in experiment.metadata.annotations):
        experiment = with_folder(experiment, folder)
    violations += missing_on_this_machine(experiment, document, folder)
    if experiment is None or violations:
        raise spec_error(path, violations)
    return experiment


def parse_experiment(document: Mapping[str, Any], folder: Path) -> Experiment:
    """Returns the experiment of a document from a cluster's API server; relative paths start at `folder`.

    Does not check what this machine has. Raises SpecError.
    """
    copy = json.loads(json.dumps(document))
    violations = make_absolute(copy, folder)
    experiment, found = _parse(copy)
    violations += found
    if experiment is None or violations:
        raise spec_error(Path(str(copy.get("metadata", {}).get("name", "experiment"))), violations)
    return experiment


def load_resolved(path: Path) -> Experiment:
    """Reads what `dump_resolved` wrote, for services. Does not check what this machine has. Raises SpecError."""
    experiment, violations = _parse(read_yaml(path))
    if experiment is None:
        raise spec_error(path, violations)
    return experiment


def validate_file(path: Path, overrides: Sequence[str] = ()) -> list[Violation]:
    """Returns everything that is wrong with the experiment at `path`; empty if it can run here."""
    try:
        load_experiment(path, overrides)
    except SpecError as error:
        return list(error.violations)
    return []


def dump_resolved(experiment: Experiment) -> str:
    """Returns the experiment as YAML with every default; `load_resolved` and `kubectl apply` read it."""
    return yaml_core.dump(written(experiment))


def _parse(document: Mapping[str, Any]) -> tuple[Experiment | None, list[Violation]]:
    copy = json.loads(json.dumps(document))
    with suppress(ValidationError):
        return _validated(copy), []
    # Perhaps an earlier release wrote it. These need the schema, whose making takes longer than all else here.
    drop_foreign_defaults(copy)
    drop_removed_keys(copy)
    try:
        return _validated(copy), []
    except ValidationError as error:
        return None, violations_of(error, copy)


def _validated(document: Mapping[str, Any]) -> Experiment:
    # As JSON and by alias only: then types and names are checked exactly as a cluster's API server checks them.
    return Experiment.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
