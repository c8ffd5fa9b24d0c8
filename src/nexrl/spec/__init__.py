"""The experiment file: its schema (`experiment`), how it is read (`load`), and its reference page (`reference`)."""

from nexrl.spec.experiment import Experiment, ExperimentSpec
from nexrl.spec.load import (
    SpecError,
    dump_resolved,
    load_experiment,
    load_resolved,
    parse_experiment,
    validate_file,
    with_folder,
    write_code,
)
from nexrl.spec.schema import json_schema

__all__ = [
    "Experiment",
    "ExperimentSpec",
    "SpecError",
    "dump_resolved",
    "json_schema",
    "load_experiment",
    "load_resolved",
    "parse_experiment",
    "validate_file",
    "with_folder",
    "write_code",
]
