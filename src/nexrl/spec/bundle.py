"""One document with everything: an experiment file and, in `spec.code`, the modules beside it that it needs."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nexrl.errors import Violation
from nexrl.spec.load import SpecError, read_document

_REFERENCES = (
    ("data", "factory"),
    ("validation", "data", "factory"),
    ("rollout", "reward"),
    ("rollout", "environment"),
)


def bundle(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The experiment at `path` as a document that needs no other file. Whether it can run here is not judged.

    Raises SpecError for a file that is no YAML, or when one of its modules is a package: that belongs into an image.
    """
    document = read_document(path, overrides)
    spec = document.get("spec")
    if isinstance(spec, dict):
        code = dict(_modules(_names(spec), path.resolve().parent))
        if code:
            document["spec"] = {**spec, "code": {**code, **spec.get("code", {})}}
    return document


def _names(spec: Mapping[str, Any]) -> Iterator[str]:
    """The modules to which the spec refers."""
    for *sections, key in _REFERENCES:
        section: Any = spec
        for name in sections:
            section = section.get(name) if isinstance(section, Mapping) else None
        reference = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(reference, str):
            yield reference.partition(":")[0]


def _modules(names: Iterator[str], folder: Path) -> Iterator[tuple[str, str]]:
    """File name and text of those modules that are in `folder`, and of what they import from there."""
    pending, seen = list(names), set()
    while pending:
        name = pending.pop().partition(".")[0]
        if name in seen:
            continue
        seen.add(name)
        if (folder / name / "__init__.py").is_file():
            why = f"{folder / name} is a package; put it into an image of yours (template), or make it a module"
            raise SpecError(f"{name}: {why}", violations=[Violation(name, why)])
        file = folder / f"{name}.py"
        if file.is_file():
            text = file.read_text()
            yield file.name, text
            pending += _imports(text)


def _imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
