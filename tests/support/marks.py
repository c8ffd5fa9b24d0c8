"""Reads the `@pytest.mark.guide("H7")` marks of all tests from their source, without importing or running a test."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def find_tests(folder: Path) -> dict[str, list[str]]:
    """Tests by row, as `path::Class::name` relative to the repository, sorted."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        for name, row_ids in _marked(module.body, _module_marks(module)):
            for row_id in row_ids:
                tests[row_id].append(f"{path.relative_to(ROOT)}::{name}")
    return dict(tests)


def _module_marks(module: ast.Module) -> list[str]:
    assigned = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets)
    ]
    return [row_id for value in assigned for row_id in _rows_in(value)]


def _marked(
    body: Sequence[ast.stmt], inherited: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Sequence[str]]]:
    """Tests of a module or class with the rows of their marks, including the marks of the enclosing class or module."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        row_ids = [*inherited, *(row_id for decorator in node.decorator_list for row_id in _rows_in(decorator))]
        if isinstance(node, ast.ClassDef):
            yield from _marked(node.body, row_ids, f"{prefix}{node.name}::")
        elif node.name.startswith("test_") and row_ids:
            yield f"{prefix}{node.name}", row_ids


def _rows_in(marks: ast.expr) -> list[str]:
    """Arguments of every `pytest.mark.guide(...)` in an expression."""
    return [
        str(ast.literal_eval(argument))
        for node in ast.walk(marks)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.guide"
        for argument in node.args
    ]
