"""What an experiment needs and this machine does not have: files, packages, code of the user, tasks."""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from nexrl.code_reference import load_reference, refused_arguments, unfit
from nexrl.datasets import DatasetError, open_dataset, open_datasets
from nexrl.errors import InvalidArgumentError, Violation
from nexrl.gpus import usable_gpus
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.experiment import Experiment, ExperimentSpec
from nexrl.spec.inference import InferenceSpec
from nexrl.spec.marks import marked_values
from nexrl.spec.model import ModelSpec, PathModel
from nexrl.spec.monitor import LoggerSpec
from nexrl.spec.section import CODE, written
from nexrl.spec.trainer import ResumeFromPath, ResumeSpec, TrainerSpec
from nexrl.spec.violations import dotted, path_in_file


def missing_on_this_machine(
    experiment: Experiment | None, document: Mapping[str, Any], folder: Path
) -> list[Violation]:
    """Returns what is missing. If some keys are wrong, so that there is no experiment, the others are still checked."""
    sections = _readable_sections(document) if experiment is None else dict(experiment.spec)
    checks: dict[str, Callable[[Any], list[Violation]]] = {
        "model": _missing_model,
        "algorithm": _missing_teacher,
        "inference": _missing_inference,
        "trainer": _missing_trainer,
        "resume": _missing_resume,
        "logger": _missing_logger,
    }
    violations = [
        problem for name, check in checks.items() if sections.get(name) is not None for problem in check(sections[name])
    ]
    violations += _missing_code(document if experiment is None else written(experiment), folder)
    if experiment is not None:
        return violations + _wrong_tasks(lambda: open_datasets(experiment.spec, experiment.folder))
    if "data" in sections:
        violations += _wrong_tasks(lambda: open_dataset(sections["data"], folder))
    if sections.get("validation") is not None:
        violations += _wrong_tasks(lambda: open_dataset(sections["validation"].data, folder, "validation"))
    return violations


def _missing_code(document: Mapping[str, Any], folder: Path) -> list[Violation]:
    """References that cannot be imported or name the wrong thing. Those of data are left to the check of its tasks."""
    violations = []
    for path, section, key, mark in marked_values(CODE, document):
        reference = section[key]
        if "data" in path or not isinstance(reference, str) or ":" not in reference:
            continue
        try:
            found = load_reference(reference, folder)
        except InvalidArgumentError as error:
            violations.append(Violation(dotted(path), error.message))
            continue
        if problem := unfit(found, **mark):
            violations.append(Violation(dotted(path), f"{reference} {problem}"))
        elif path == ["spec", "algorithm", "loss"]:
            violations += _unaccepted_config(found, section)
    return violations


def _unaccepted_config(loss: object, algorithm: Mapping[str, Any]) -> list[Violation]:
    config = algorithm.get("lossConfig") or {}
    problem = refused_arguments(loss, ["inputs"], config) if isinstance(config, Mapping) else ""
    described = f"{algorithm['loss']} does not accept it: {problem}"
    return [Violation("spec.algorithm.lossConfig", described)] if problem else []


def _wrong_tasks(open_tasks: Callable[[], object]) -> list[Violation]:
    try:
        open_tasks()
    except DatasetError as error:
        return list(error.violations)
    return []


def _readable_sections(document: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a wrong document, each without its wrong keys, as far as they can be read."""
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return {}
    sections = {}
    # These have the same name in the file and in Python.
    for name in ("model", "algorithm", "data", "inference", "trainer", "validation", "resume", "logger"):
        with suppress(ValidationError, KeyError):
            adapter = TypeAdapter[Any](cast(Any, ExperimentSpec.model_fields[name].annotation))
            sections[name] = _without_wrong_keys(adapter, name, spec[name])
    return sections


def _without_wrong_keys(adapter: TypeAdapter[Any], name: str, section: Any) -> Any:
    """The section without its wrong keys. Raises ValidationError if the rest is no section."""
    try:
        return adapter.validate_json(json.dumps(section), by_alias=True, by_name=False)
    except ValidationError as error:
        rest = json.loads(json.dumps(section))
        for details in error.errors():
            document = {"spec": {name: rest}}
            details["loc"] = ("spec", name, *details["loc"])
            _drop(rest, path_in_file(details, document)[2:])
        return adapter.validate_json(json.dumps(rest), by_alias=True, by_name=False)


def _drop(section: Any, path: Sequence[str | int]) -> None:
    *parents, key = path or [""]
    for parent in parents:
        section = section[parent] if isinstance(section, dict) and parent in section else section
    if isinstance(section, dict):
        section.pop(key, None)


def _missing_model(model: ModelSpec) -> list[Violation]:
    base = _missing_weights("spec.model.path", model.path) if isinstance(model, PathModel) else []
    return base + _missing_adapter(model)


def _missing_teacher(algorithm: AlgorithmSpec) -> list[Violation]:
    teacher = algorithm.teacher
    return [] if teacher is None else _missing_weights("spec.algorithm.teacher.path", teacher.path)


def _missing_adapter(model: ModelSpec) -> list[Violation]:
    folder = model.lora.initial_adapter if model.lora is not None else None
    if folder is None or (Path(folder) / "adapter_config.json").is_file():
        return []
    described = f"{folder} is no adapter in PEFT's format: it has no adapter_config.json"
    return [Violation("spec.model.lora.initialAdapter", described)]


def _missing_weights(key: str, path: str) -> list[Violation]:
    if path.startswith("package:"):
        package = path.removeprefix("package:")
        is_installed = package.isidentifier() and importlib.util.find_spec(package) is not None
        return [] if is_installed else [Violation(key, f"{path}: no Python package {package!r} is installed")]
    if not Path(path).is_dir():
        return [Violation(key, f"{path} {'is not a folder' if Path(path).exists() else 'does not exist'}")]
    has_config = (Path(path) / "config.json").is_file()
    return [] if has_config else [Violation(key, f"{path} is no Hugging Face model: it has no config.json")]


def _missing_inference(inference: InferenceSpec) -> list[Violation]:
    missing, package = _missing_gpus("spec.inference.gpus", inference.gpus), inference.PACKAGE
    if package is None or importlib.util.find_spec(package) is not None:
        return missing
    described = f'"{inference.backend}" is not installed here (`make setup-{package}` installs it); allowed: builtin'
    return [*missing, Violation("spec.inference.backend", described)]


def _missing_trainer(trainer: TrainerSpec) -> list[Violation]:
    missing = _missing_gpus("spec.trainer.gpus", trainer.gpus)
    count = len(set(trainer.gpus)) or len(usable_gpus())
    if missing or not count or trainer.ranks <= count or trainer.device == "cpu" or trainer.backend == "mock":
        return missing
    described = f"{trainer.ranks} ranks need a GPU each, and the trainer may use {count}; use fewer, or device: cpu"
    return [Violation("spec.trainer.processesPerReplica", described)]


def _missing_gpus(path: str, numbers: Sequence[int]) -> list[Violation]:
    count = len(usable_gpus())
    allowed = f"there are {count} GPUs here; allowed: 0 to {count - 1}" if count else "there is no GPU here; remove it"
    return [Violation(path, f"{number}: {allowed}") for number in numbers if number >= count]


def _missing_resume(resume: ResumeSpec) -> list[Violation]:
    if not isinstance(resume, ResumeFromPath) or Path(resume.path).is_dir():
        return []
    return [Violation("spec.resume.path", f"{resume.path} does not exist or is not a folder")]


def _missing_logger(logger: LoggerSpec) -> list[Violation]:
    if "wandb" not in logger.backends or importlib.util.find_spec("wandb") is not None:
        return []
    return [Violation("spec.logger.backends", '"wandb" requires the package wandb, which is not installed')]
