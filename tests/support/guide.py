"""Writes docs/reference/developer-guide.md: each promise of the guide, where it lives here, the tests that prove it.

Rows come from developer-guide.yaml beside the page, tests from `@pytest.mark.guide("H7")` markers (on a test, a class,
or a module's `pytestmark`), which are read from the source: the page is made without running or importing a test.

    python -m tests.support.guide            write the page
    python -m tests.support.guide --check    fail when it is not up to date
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs/reference/developer-guide.yaml"
PAGE = ROOT / "docs/reference/developer-guide.md"
TESTS = ROOT / "tests"
STATES = ("done", "untested", "by design", "open")

_PREAMBLE = """# The developer guide, row by row

What each component must offer, where it lives here, and the tests that prove it. Written by `make guide` from
[developer-guide.yaml](developer-guide.yaml) and the `guide` markers of the tests; do not edit.

**done**: it is here, and a test proves it. **untested**: it is here; no test is marked with the row yet.
**by design**: done in another way, which the page names, and no test is marked with it. **open**: still to be built.
"""


@dataclass(frozen=True)
class Row:
    """One promise. `where` is empty while nothing here keeps it."""

    row_id: str
    section: str
    item: str
    where: str


def main() -> None:
    """Write the page, or with `--check` compare it."""
    parser = argparse.ArgumentParser(description="Write docs/reference/developer-guide.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is not up to date")
    is_check = parser.parse_args().check
    page = render(load_rows(), find_tests(TESTS))
    if not is_check:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not up to date: run `make guide`")


def load_rows() -> list[Row]:
    """All rows, in the order of the file."""
    sections = yaml.safe_load(ROWS.read_text())
    return [
        Row(row_id, section, item, where)
        for section, rows in sections.items()
        for row_id, (item, where) in rows.items()
    ]


def find_tests(folder: Path) -> dict[str, list[str]]:
    """Tests by row, as `path::Class::name` relative to the repository, sorted."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        for name, row_ids in _marked(module.body, _module_marks(module)):
            for row_id in row_ids:
                tests[row_id].append(f"{path.relative_to(ROOT)}::{name}")
    return dict(tests)


def render(rows: Sequence[Row], tests: Mapping[str, Sequence[str]]) -> str:
    """The page. Raises ValueError for a marker that names no row."""
    unknown = set(tests) - {row.row_id for row in rows}
    if unknown:
        raise ValueError(f"markers name rows that do not exist: {', '.join(sorted(unknown))}")
    lines = [_PREAMBLE, *_summary(rows, tests)]
    for section in dict.fromkeys(row.section for row in rows):
        lines += ["", f"## {section}", "", "| row | item | here | proved by | state |", "|---|---|---|---|---|"]
        lines += [_line(row, tests.get(row.row_id, [])) for row in rows if row.section == section]
    return "\n".join(lines) + "\n"


def _summary(rows: Sequence[Row], tests: Mapping[str, Sequence[str]]) -> Iterator[str]:
    states = [_state(row, tests.get(row.row_id, [])) for row in rows]
    yield f"Of {len(rows)} rows: " + ", ".join(f"{states.count(state)} {state}" for state in STATES)
    open_rows = [row.row_id for row, state in zip(rows, states, strict=True) if state == "open"]
    yield f"\nOpen: {', '.join(open_rows) or 'none'}"


def _state(row: Row, tests: Sequence[str]) -> str:
    if not row.where:
        return "open"
    if tests:
        return "done"
    return "by design" if row.where.startswith("by design") else "untested"


def _line(row: Row, tests: Sequence[str]) -> str:
    proofs = "<br>".join(f"[{test.rpartition('::')[2]}](../../{test.partition('::')[0]})" for test in tests)
    return f"| {row.row_id} | {row.item} | {row.where} | {proofs} | {_state(row, tests)} |"


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
    """Tests of a module or class with the rows of their markers, those of what encloses them included."""
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


if __name__ == "__main__":
    main()
