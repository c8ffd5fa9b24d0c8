"""The page of the developer guide points only to things that exist."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from nexrl.spec.schema import SchemaView
from tests.mutations.mutation import load_mutations, parse, resolve
from tests.support.guide import Row, load_rows, proving_tests, render
from tests.support.marks import ROOT, TESTS, find_tests

SOURCES = (ROOT / "src", *sorted((ROOT / "services").iterdir()))
PROTOS = "\n".join(path.read_text() for path in sorted((ROOT / "proto").rglob("*.proto")))


@pytest.mark.parametrize("row", load_rows(), ids=lambda row: row.row_id)
def test_every_name_in_backquotes_exists(row: Row) -> None:
    names = re.findall(r"`([^`]+)`", row.where)
    assert [name for name in names if not _exists(name)] == []


def test_all_rows_of_the_guide_are_there() -> None:
    counts = {"A": 7, "B": 11, "C": 6, "D": 12, "E": 10, "F": 4, "G": 18, "H": 18, "I": 8, "J": 14, "K": 7, "L": 19}
    counts |= {"M": 22, "N": 6, "O": 7, "P": 3, "Q": 50, "R": 6, "S": 14}
    expected = [f"{letter}{number}" for letter, count in counts.items() for number in range(1, count + 1)]
    assert [row.row_id for row in load_rows()] == expected


def test_markers_name_rows_that_exist() -> None:
    assert set(find_tests(TESTS)) <= {row.row_id for row in load_rows()}


def test_markers_of_modules_and_classes_count_for_their_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.marks.ROOT", tmp_path)
    (tmp_path / "test_one.py").write_text(
        "pytestmark = [pytest.mark.guide('A1')]\n"
        "class TestPool:\n    @pytest.mark.guide('H7', 'H8')\n    async def test_put(self): ...\n"
        "def test_get(): ...\n"
        "def not_a_test(): ...\n"
    )
    put, get = "test_one.py::TestPool::test_put", "test_one.py::test_get"
    assert find_tests(tmp_path) == {"A1": [put, get], "H7": [put], "H8": [put]}


def test_a_row_is_done_only_with_a_place_a_test_and_a_mutation() -> None:
    rows = [Row("A1", "S", "one", "here"), Row("A2", "S", "two", "here"), Row("A3", "S", "three", "open: all of it")]
    rows += [Row("A4", "S", "four", "by design: otherwise"), Row("A5", "S", "five", "here")]
    test = "tests/test_one.py::test_put"
    page = render(rows, {"A1": [test], "A2": [test], "A3": [test]}, {"A1": {test}})
    states = {line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip("| ") for line in page.splitlines()}
    assert (states["A1"], states["A2"]) == ("done", "not yet proven by a mutation")
    assert (states["A3"], states["A4"], states["A5"]) == ("open", "by design", "untested")
    assert "Open: A3" in page
    assert page.count("**[test_put](../../tests/test_one.py)**") == 1


def test_a_mark_of_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="Z9"):
        render([], {"Z9": ["tests/test_one.py::test_put"]}, {})


def test_each_mutation_takes_text_out_that_is_there_and_names_a_test_that_is_marked_with_its_rows() -> None:
    assert set(proving_tests()) <= {row.row_id for row in load_rows()}
    assert [mutation.what for mutation in load_mutations() if mutation.text == mutation.without] == []


def test_each_guard_of_the_ledger_has_its_test() -> None:
    tests = {mutation.test.partition("[")[0] for mutation in load_mutations() if mutation.guard}
    assert [test for test in sorted(tests) if not _has_test(test)] == []


OUT_OF_DATE = """
in: tests/mutations/mutation.py
mutations:
- {rows: A1, text: no such text, without: "", test: test_put}
- {rows: A2, text: "def resolve(", without: "def resolve)", test: test_put}
- {rows: A3, text: "def resolve(", without: "def resolved(", test: test_get}
"""


def test_all_mutations_that_are_out_of_date_are_named_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)A1: .*occurs 0 times.*A2: .*not valid Python.*A3: 0 tests named test_get"
    ):
        resolve(parse(OUT_OF_DATE), {row_id: ["tests/test_one.py::test_put"] for row_id in ("A1", "A2", "A3")})


def _has_test(test: str) -> bool:
    file, _, names = test.partition("::")
    return (ROOT / file).is_file() and _holds(_tree(ROOT / file).body, names.split("::") if names else [])


def _exists(name: str) -> bool:
    kind, _, rest = name.partition(" ")
    if kind in ("message", "enum"):
        return f"{kind} {rest} {{" in PROTOS
    if kind == "nexrl":
        command, *files = rest.split()
        return _is_python(["nexrl", "cli", command]) and all((ROOT / file).is_file() for file in files)
    if name == "nexrl.services":  # the entry points, in pyproject.toml
        return True
    if name.startswith("spec."):
        return bool(_schema().at(name.split("."), {}))
    if name.split(".")[0].endswith("Service"):
        service, _, method = name.partition(".")
        return bool(re.search(rf"service {service} {{[^}}]*rpc {method}\(", PROTOS))
    return _is_python(name.split(".")) if name.startswith("nexrl") else _is_word(name)


def _is_word(name: str) -> bool:
    """Field names and settings, which the sentence places: somewhere in the protos or in the settings."""
    settings = (ROOT / "src/nexrl/settings.py").read_text()
    return bool(re.search(rf"\b{name}\b", PROTOS + settings)) or name == "activity"


def _is_python(parts: Sequence[str]) -> bool:
    """Whether the longest part that is a module holds the rest, as classes, functions or constants."""
    for length in range(len(parts), 0, -1):
        for source in SOURCES:
            module = source.joinpath(*parts[:length])
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            if file.is_file():
                return _holds(_tree(file).body, parts[length:])
    return False


def _holds(body: Sequence[ast.stmt], names: Sequence[str]) -> bool:
    if not names:
        return True
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return _holds(node.body, names[1:])
    return False


@cache
def _schema() -> SchemaView:
    return SchemaView()


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
