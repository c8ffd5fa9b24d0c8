"""`make guide-mutants` detects tests that pass without their feature, and selects the rows that a change concerns."""

import subprocess
from pathlib import Path

import pytest

from tests.mutations import copies, guide
from tests.mutations.__main__ import changed_guards
from tests.mutations.copies import Mutation, try_all
from tests.mutations.features import Feature, parse
from tests.mutations.guard import Guard

ROWS = "in: src\nmutations:\n- {rows: A1, text: one, without: '', test: test_one}\n"
LATER = "- {rows: A2, text: two, without: '', test: test_two}\n"
TEST = "tests/form/test_guide.py::test_a_mark_of_no_row_is_refused"


def test_a_test_that_misses_what_is_taken_out_is_told_from_one_that_notices() -> None:
    here = "tests/support/guide.py"
    mutations = [
        Mutation("A1", here, '"""All rows, in the order of the file."""', "pass", TEST),
        Mutation("A2", here, 'raise ValueError(f"marks name', 'print(f"marks name', TEST),
    ]
    missed, noticed = try_all(mutations, must_pass=[TEST])
    assert (missed.is_noticed, noticed.is_noticed) == (False, True)
    assert "DID NOT RAISE" in noticed.says


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a source file and a test for each of two rows, and a mutation of the first."""
    for module in (guide, copies):
        monkeypatch.setattr(module, "PROJECT", tmp_path)
    monkeypatch.setattr(guide, "FOLDER", tmp_path / "rows")
    for folder in ("src", "tests", "rows"):
        (tmp_path / folder).mkdir()
    for name in ("src/one.py", "src/two.py", "tests/test_one.py", "tests/test_two.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "rows/all.yaml").write_text(ROWS)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path)
    git(tmp_path, "checkout", "--quiet", "-b", "change")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")


def chosen(project: Path, base: str = "main") -> list[str]:
    features = parse((project / "rows/all.yaml").read_text())
    known = [(feature, mutation_of(feature)) for feature in features]
    return [mutation.what for _, mutation in guide._changed(known, base)]


def mutation_of(feature: Feature) -> Mutation:
    name = feature.test.removeprefix("test_")
    return Mutation(feature.rows[0], f"src/{name}.py", feature.text, "", f"tests/test_{name}.py::{feature.test}")


@pytest.mark.parametrize("name", ["src/one.py", "tests/test_one.py"])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_row_is_tried_when_its_source_or_its_test_has_changed(project: Path, name: str, is_committed: bool) -> None:
    assert chosen(project) == []
    (project / name).write_text("changed = True\n")
    if is_committed:
        commit(project)
    assert chosen(project) == ["A1"]


def test_a_row_is_tried_when_its_mutation_is_new(project: Path) -> None:
    (project / "rows/all.yaml").write_text(ROWS + LATER)
    assert chosen(project) == ["A2"]


@pytest.mark.parametrize("name", ["src/one.py", "tests/test_one.py", "tests/mutations/step_guards.py"])
def test_a_guard_is_tried_when_its_file_its_test_or_its_list_has_changed(project: Path, name: str) -> None:
    guard = Guard(1, "one", "src/one.py", "a", "b", "tests/test_one.py::test_one")
    assert changed_guards([guard], "main") == []
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("changed = True\n")
    commit(project)
    assert changed_guards([guard], "main") == [guard]


def test_what_changed_on_the_base_meanwhile_concerns_nobody(project: Path) -> None:
    git(project, "checkout", "--quiet", "main")
    (project / "src/one.py").write_text("changed = True\n")
    commit(project)
    git(project, "checkout", "--quiet", "change")
    assert chosen(project) == []


def test_a_base_that_a_shallow_clone_lacks_is_said_and_stops_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(project, base="0123456789abcdef0123456789abcdef01234567") == []
    assert "is not in this clone: only the texts of the mutations were checked" in capsys.readouterr().out
