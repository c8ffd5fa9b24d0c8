"""Reads an experiment file: YAML, overrides, schema, and what this machine must have. All problems are in one error."""

import atexit
import difflib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from nexrl.datasets import DatasetError, open_dataset, open_datasets
from nexrl.errors import InvalidArgumentError, Violation
from nexrl.references import load_reference
from nexrl.spec import yaml_core
from nexrl.spec.experiment import (
    FOLDER_ANNOTATION,
    Experiment,
    ExperimentSpec,
    InferenceSpec,
    LoggerSpec,
    ModelSpec,
    ResumeSpec,
    RolloutSpec,
)
from nexrl.spec.schema import SchemaView

MAX_FILE_BYTES = 2**20  # what a cluster's store takes as one object

_RELATIVE_PATHS = (
    ("data", "path"),
    ("validation", "data", "path"),
    ("model", "path"),
    ("checkpoint", "path"),
    ("resume", "path"),
    ("weightSync", "path"),
)
SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=password=)[^&\s\"]+")
"""What a URL may hold, and no message repeats."""
_MODULE_FILE = re.compile(r"^[A-Za-z_]\w*\.py$")
_ROOT_KEYS = ("apiVersion", "kind", "metadata")


class SpecError(InvalidArgumentError):
    """An experiment that cannot run. Each of `violations` is a path in the file, the value, and what is allowed."""


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads the experiment at `path` for a run on this machine.

    `overrides` are `KEY=VALUE`, such as `algorithm.learningRate=1e-3`: KEY relative to spec (or `metadata.…`), VALUE as
    in YAML.
    Relative paths become absolute, from the folder of the file. Raises SpecError.
    """
    document = _read(path)
    violations = _apply(overrides, document)
    if isinstance(document.get("spec"), dict):
        violations += _make_absolute(document["spec"], path.resolve().parent)
    experiment, found = _parse(document)
    violations += found
    folder = _folder_of_code(document) or path.resolve().parent
    if experiment is not None and (experiment.spec.code or FOLDER_ANNOTATION not in experiment.metadata.annotations):
        experiment = with_folder(experiment, folder)
    violations += _missing_on_this_machine(experiment, document, folder)
    if experiment is None or violations:
        raise _spec_error(path, violations)
    return experiment


def read_document(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The document at `path` with these overrides; what is in it is not judged. Raises SpecError."""
    document = _read(path)
    if violations := _apply(overrides, document):
        raise _spec_error(path, violations)
    return document


def parse_experiment(document: Mapping[str, Any], folder: Path) -> Experiment:
    """The experiment of a document that is not in a file, as a cluster's API server gives it; paths start at `folder`.

    Whether this machine could run it is not judged. Raises SpecError.
    """
    copy = json.loads(json.dumps(document))
    violations = _make_absolute(copy["spec"], folder) if isinstance(copy.get("spec"), dict) else []
    experiment, found = _parse(copy)
    violations += found
    if experiment is None or violations:
        raise _spec_error(Path(str(copy.get("metadata", {}).get("name", "experiment"))), violations)
    return experiment


def load_resolved(path: Path) -> Experiment:
    """Reads what `dump_resolved` wrote, without looking at the machine: for services. Raises SpecError."""
    experiment, violations = _parse(_read(path))
    if experiment is None:
        raise _spec_error(path, violations)
    return experiment


def validate_file(path: Path, overrides: Sequence[str] = ()) -> list[Violation]:
    """Everything that is wrong with the experiment at `path`; empty when it can run here."""
    try:
        load_experiment(path, overrides)
    except SpecError as error:
        return list(error.violations)
    return []


def dump_resolved(experiment: Experiment) -> str:
    """The experiment as YAML with every default written out; `load_resolved` and `kubectl apply` read it."""
    return yaml_core.dump(experiment.model_dump(mode="json", by_alias=True, exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _spec_error(path, [Violation(str(path), f"cannot be read: {error.strerror}")]) from error
    if len(content) > MAX_FILE_BYTES:
        raise _spec_error(path, [Violation(str(path), f"{len(content)} bytes; at most {MAX_FILE_BYTES}")])
    try:
        document = yaml_core.load(content)
        json.dumps(document)  # an anchor that contains itself
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _spec_error(path, [Violation(f"{path}{line}", f"not valid YAML: {error.problem}")]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise _spec_error(path, [Violation(str(path), f"not valid YAML: {error}")]) from error
    if not isinstance(document, dict):
        raise _spec_error(
            path, [Violation(str(path), "a mapping with the keys apiVersion, kind, metadata, spec is needed")]
        )
    return document


def _apply(overrides: Sequence[str], document: dict[str, Any]) -> list[Violation]:
    """Writes the overrides into the document; whether their keys exist is judged with everything else."""
    violations = []
    for override in overrides:
        try:
            _apply_one(override, document)
        except ValueError as error:
            violations.append(Violation(f"override {override}", str(error)))
    return violations


def _apply_one(override: str, document: dict[str, Any]) -> None:
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


def _make_absolute(spec: dict[str, Any], folder: Path) -> list[Violation]:
    """Paths of the spec start at `folder` from now on; those that cannot be resolved are violations."""
    violations = []
    for *sections, key in _RELATIVE_PATHS:
        section: Any = spec
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        value = section.get(key) if isinstance(section, dict) else None
        if isinstance(value, str) and value and not value.startswith("package:"):
            try:
                section[key] = os.path.normpath(folder / Path(value).expanduser())
            except RuntimeError:  # "~bob", whom this machine does not know
                field = ".".join(("spec", *sections, key))
                violations.append(Violation(field, f"{value}: this machine knows no such home folder"))
    return violations


def write_code(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with its `spec.code`, if any, in `folder`, where its modules are looked up from now on."""
    if not experiment.spec.code:
        return experiment
    folder.mkdir(exist_ok=True)
    for name, text in experiment.spec.code.items():
        (folder / name).write_text(text)
    return with_folder(experiment, folder)


def _folder_of_code(document: Mapping[str, Any]) -> Path | None:
    """A folder, until this process ends, with the modules in `spec.code`; None when there are none."""
    spec = document.get("spec")
    code = spec.get("code") if isinstance(spec, dict) else None
    files = {name: text for name, text in code.items() if _MODULE_FILE.match(name)} if isinstance(code, dict) else {}
    if not files:
        return None
    folder = Path(tempfile.mkdtemp(prefix="nexrl-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, text in files.items():
        (folder / name).write_text(str(text))
    return folder


def with_folder(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with `folder` as the one beside which modules are looked up."""
    annotations = {**experiment.metadata.annotations, FOLDER_ANNOTATION: str(folder)}
    metadata = experiment.metadata.model_copy(update={"annotations": annotations})
    return experiment.model_copy(update={"metadata": metadata})


def _parse(document: Mapping[str, Any]) -> tuple[Experiment | None, list[Violation]]:
    try:
        # As JSON and by alias only: then types and names are judged exactly as a cluster's API server would judge them.
        return Experiment.model_validate_json(json.dumps(document), by_alias=True, by_name=False), []
    except ValidationError as error:
        view = SchemaView()
        # A default that was to be derived from a wrong value adds nothing.
        errors = [details for details in error.errors() if details["type"] != "default_factory_not_called"]
        violations = [_violation(details, document, view) for details in errors]
        return None, _outermost_last(violations)


def _outermost_last(violations: Sequence[Violation]) -> list[Violation]:
    """Drops what only repeats the problem of a list's items at the list itself."""
    fields = [violation.field for violation in violations]
    return [one for one in violations if not any(field.startswith(f"{one.field}[") for field in fields)]


def _violation(details: ErrorDetails, document: Mapping[str, Any], view: SchemaView) -> Violation:
    path = _path(details, document)
    match details["type"]:
        case "extra_forbidden":
            return Violation(_dotted(path), _unknown_key(path, document, view))
        case "rule":
            return Violation(_dotted(path), f"{_shown(details['input'])} is not allowed: {details['msg']}")
        case "missing" | "union_tag_not_found":
            return Violation(_dotted(path), f"missing; allowed: {view.allowed(view.at(path, document))}")
        case _:
            value = details["input"]["type"] if details["type"] == "union_tag_invalid" else details["input"]
            return Violation(
                _dotted(path), f"{_shown(value)} is not allowed; allowed: {view.allowed(view.at(path, document))}"
            )


def _path(details: ErrorDetails, document: Mapping[str, Any]) -> list[str | int]:
    """The path in the file: pydantic's, without the variant of a union that it inserts after `data`."""
    path = list(details["loc"])
    if "data" in path and path.index("data") + 1 < len(path):
        del path[path.index("data") + 1]
    if details["type"] == "rule" and isinstance(path[-1], str):
        path[-1] = to_camel(path[-1])  # pydantic names a default that breaks a rule as Python does
    if details["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        path.append("type")
    return path


def _unknown_key(path: Sequence[str | int], document: Mapping[str, Any], view: SchemaView) -> str:
    *parents, key = path
    known = list(view.at(parents, document).get("properties", {}))
    near = difflib.get_close_matches(to_camel(str(key)), known, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known here: {', '.join(known)}"


def _dotted(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _shown(value: object) -> str:
    text = SECRET.sub("...", json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _missing_on_this_machine(
    experiment: Experiment | None, document: Mapping[str, Any], folder: Path
) -> list[Violation]:
    """What the experiment needs and this machine does not have: files, packages, variables, tasks.

    When there is no experiment, because some key is wrong, what the others say is looked at all the same.
    """
    sections = _readable_sections(document) if experiment is None else dict(experiment.spec)
    checks: dict[str, Callable[[Any], list[Violation]]] = {
        "model": _missing_model,
        "inference": _missing_inference,
        "resume": _missing_resume,
        "logger": _missing_logger,
    }
    violations = [
        problem for name, check in checks.items() if sections.get(name) is not None for problem in check(sections[name])
    ]
    if sections.get("rollout") is not None:
        violations += _missing_code(sections["rollout"], folder)
    if experiment is not None:
        return violations + _wrong_tasks(lambda: open_datasets(experiment.spec, experiment.folder))
    if "data" in sections:
        violations += _wrong_tasks(lambda: open_dataset(sections["data"], folder))
    if sections.get("validation") is not None:
        violations += _wrong_tasks(lambda: open_dataset(sections["validation"].data, folder, "validation"))
    return violations


def _missing_code(rollout: RolloutSpec, folder: Path) -> list[Violation]:
    violations = []
    for key, reference in (("reward", rollout.reward), ("environment", rollout.environment)):
        try:
            if reference is not None:
                load_reference(reference, folder)
        except InvalidArgumentError as error:
            violations.append(Violation(f"spec.rollout.{key}", error.message))
    return violations


def _wrong_tasks(open_tasks: Callable[[], object]) -> list[Violation]:
    try:
        open_tasks()
    except DatasetError as error:
        return list(error.violations)
    return []


def _readable_sections(document: Mapping[str, Any]) -> dict[str, Any]:
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return {}
    sections = {}
    # The same word in file and Python.
    for name in ("model", "data", "rollout", "inference", "validation", "resume", "logger"):
        with suppress(ValidationError, KeyError):
            field = ExperimentSpec.model_fields[name]
            adapter = TypeAdapter[Any](cast(Any, Annotated[field.annotation, Field(discriminator=field.discriminator)]))
            sections[name] = _without_wrong_keys(adapter, spec[name])
    return sections


def _without_wrong_keys(adapter: TypeAdapter[Any], section: Any) -> Any:
    """The section, without those of its keys that are wrong. Raises ValidationError when the others make none."""
    try:
        return adapter.validate_json(json.dumps(section), by_alias=True, by_name=False)
    except ValidationError as error:
        rest = json.loads(json.dumps(section))
        for details in error.errors():
            _drop(rest, details["loc"])
        return adapter.validate_json(json.dumps(rest), by_alias=True, by_name=False)


def _drop(section: Any, path: Sequence[str | int]) -> None:
    """Takes a key out; what pydantic inserts into its path, the variant of a union, is in no file."""
    *parents, key = path or [""]
    for parent in parents:
        section = section[parent] if isinstance(section, dict) and parent in section else section
    if isinstance(section, dict):
        section.pop(key, None)


def _missing_model(model: ModelSpec) -> list[Violation]:
    key, path = "spec.model.path", model.path
    if path is None:
        return []
    if path.startswith("package:"):
        package = path.removeprefix("package:")
        is_installed = package.isidentifier() and importlib.util.find_spec(package) is not None
        return [] if is_installed else [Violation(key, f"{path}: no Python package {package!r} is installed")]
    if not Path(path).is_dir():
        return [Violation(key, f"{path} {'is not a folder' if Path(path).exists() else 'does not exist'}")]
    has_config = (Path(path) / "config.json").is_file()
    return [] if has_config else [Violation(key, f"{path} is no Hugging Face model: it has no config.json")]


def _missing_inference(inference: InferenceSpec) -> list[Violation]:
    violations = []
    if inference.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        described = '"vllm" is not installed here (`make setup-vllm` installs it); allowed: builtin'
        violations.append(Violation("spec.inference.backend", described))
    if inference.url is not None:
        described = (
            f"{inference.url}: weights cannot be synced into an engine that the run has not started; leave it out"
        )
        violations.append(Violation("spec.inference.url", described))
    if inference.api_key_env is not None and inference.api_key_env not in os.environ:
        described = f"the environment has no variable {inference.api_key_env}"
        violations.append(Violation("spec.inference.apiKeyEnv", described))
    return violations


def _missing_resume(resume: ResumeSpec) -> list[Violation]:
    if resume.path is None or Path(resume.path).is_dir():
        return []
    return [Violation("spec.resume.path", f"{resume.path} does not exist or is not a folder")]


def _missing_logger(logger: LoggerSpec) -> list[Violation]:
    if "wandb" not in logger.backends or importlib.util.find_spec("wandb") is not None:
        return []
    return [Violation("spec.logger.backends", '"wandb" needs the package wandb, which is not installed')]


def _spec_error(path: Path, violations: Sequence[Violation]) -> SpecError:
    counted = "1 problem" if len(violations) == 1 else f"{len(violations)} problems"
    lines = "".join(f"\n  {violation}" for violation in violations)
    return SpecError(f"{path}: {counted}{lines}", violations=violations)
