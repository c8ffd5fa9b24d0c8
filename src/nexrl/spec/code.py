"""`spec.code`: the user's modules inside the document, and the folder in which they are looked up."""

import atexit
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexrl.spec.experiment import FOLDER_ANNOTATION, Experiment

_MODULE_FILE = re.compile(r"^[A-Za-z_]\w*\.py$")


def write_code(experiment: Experiment, folder: Path) -> Experiment:
    """Writes the experiment's `spec.code`, if any, to `folder`. Returns the experiment that looks modules up there."""
    if not experiment.spec.code:
        return experiment
    folder.mkdir(exist_ok=True)
    for name, text in experiment.spec.code.items():
        (folder / name).write_text(text)
    return with_folder(experiment, folder)


def with_folder(experiment: Experiment, folder: Path) -> Experiment:
    """Returns the experiment with `folder` as the one beside which modules are looked up."""
    annotations = {**experiment.metadata.annotations, FOLDER_ANNOTATION: str(folder)}
    metadata = experiment.metadata.model_copy(update={"annotations": annotations})
    return experiment.model_copy(update={"metadata": metadata})


def temporary_folder(document: Mapping[str, Any]) -> Path | None:
    """Writes the modules in `spec.code` to a folder that exists until this process ends; None if there are none."""
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
