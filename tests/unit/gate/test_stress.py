"""`make stress` finds tests that depend on luck, and the gate runs it for the tests that a change adds."""

import math
import os
import subprocess
from pathlib import Path

import pytest

from tests.gate import landings, stress

BEFORE = """\
def test_put():
    assert True
"""
AFTER = """\
def test_put():
    def test_inside(): ...
    assert "changed"
TEXT = '''
def test_quoted(): ...
'''
async def test_get(): ...
def helper(): ...
"""
FAILS_IN_ONE_OF_THREE = """
from pathlib import Path

def test_luck(worker_id):
    assert worker_id != "gw2"
"""
PASSES = "def test_always():\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(landings, "ROOT", tmp_path)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_a_test_is_new_if_its_function_is(folder: Path) -> None:
    for name in ("tests/unit/test_pool.py", "tests/unit/test_moved.py"):
        write(folder / name, BEFORE)
    run("git", "init", "--quiet")
    run("git", "add", ".")
    run("git", "-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "--quiet", "--message=before")
    run("git", "mv", "tests/unit/test_moved.py", "tests/unit/test_place.py")
    write(folder / "tests/unit/test_pool.py", AFTER)
    write(folder / "tests/e2e/test_run.py", AFTER)
    write(folder / "tests/integration/test_new.py", "async def test_new(): ...")
    run("git", "add", ".")
    assert stress.added_tests("HEAD") == [
        "tests/integration/test_new.py::test_new",
        "tests/unit/test_pool.py::test_get",
    ]


@pytest.mark.parametrize(("text", "code"), [(FAILS_IN_ONE_OF_THREE, 1), (PASSES, 0)])
def test_a_test_that_fails_in_one_of_three_processes_is_red(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    monkeypatch.setattr(stress, "ROUNDS", 1)
    (folder / "test_luck.py").write_text(text)
    assert stress.stress(["test_luck.py"], math.inf) == code


def test_what_has_no_time_is_said_and_left_to_make_stress(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "test_always.py").write_text(PASSES)
    assert stress.stress(["test_always.py"], 0.0) == 0
    assert "1 of 7 rounds had time" in capsys.readouterr().out


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def run(*command: str) -> None:
    subprocess.run(command, check=True)
