"""One document with everything: an experiment file and, in `spec.code`, the modules beside it that it refers to."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nexrl.errors import Violation
from nexrl.spec.document import read_document
from nexrl.spec.marks import marked_values
from nexrl.spec.section import CODE
from nexrl.spec.violations import SpecError, spec_error


def bundle(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the experiment at `path` as a document that needs no other file. Does not check that it can run here.

    Raises SpecError if the file is not valid YAML, or if one of its modules is not valid Python in UTF-8, or is a
    package: packages belong in an image.
    """
    document = read_document(path, overrides)
    spec = document.get("spec")
    if isinstance(spec, dict):
        values = (section[key] for _, section, key, _ in marked_values(CODE, document))
        names = [value.partition(":")[0] for value in values if isinstance(value, str) and ":" in value]
        code = dict(_modules(names, path.resolve().parent))
        if code:
            document["spec"] = {**spec, "code": {**code, **spec.get("code", {})}}
    return document


def _modules(names: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """File name and text of those modules that are in `folder`, and of what they import from there."""
    pending, seen = list(names), set()
    while pending:
        name = pending.pop().partition(".")[0]
        if name in seen:
            continue
        seen.add(name)
        if (folder / name / "__init__.py").is_file():
            why = f"{folder / name} is a package; install it in an image of yours (template), or make it a module"
            raise SpecError(f"{name}: {why}", violations=[Violation(name, why)])
        file = folder / f"{name}.py"
        if file.is_file():
            text, tree = _parsed(file)
            yield file.name, text
            pending += _imports(tree)


def _parsed(file: Path) -> tuple[str, ast.Module]:
    """Return the text of a module and its syntax tree. Raises SpecError."""
    try:
        text = file.read_text("utf-8-sig")
        return text, ast.parse(text)
    except UnicodeDecodeError as error:
        line, why = error.object[: error.start].count(b"\n") + 1, f"not UTF-8: {error.reason}"
    except SyntaxError as error:
        line, why = error.lineno or 1, f"not valid Python: {error.msg}"
    raise spec_error(file, [Violation(f"{file} line {line}", why)])


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
