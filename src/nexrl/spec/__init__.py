"""The experiment file: its sections (a module for each), how it is read (`load`), and its reference page."""

from nexrl.spec.code import with_folder, write_code
from nexrl.spec.experiment import Experiment, ExperimentSpec
from nexrl.spec.load import dump_resolved, load_experiment, load_resolved, parse_experiment, validate_file
from nexrl.spec.schema import json_schema
from nexrl.spec.violations import SpecError

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
