"""`make mutants` tells tests that notice from those that do not, and knows what a change makes unproven."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import __main__ as command
from tests.mutations import copies, proofs
from tests.mutations.copies import Verdict, try_all
from tests.mutations.mutation import Mutation

HERE = "tests/support/guide.py"
TEST = "tests/form/test_guide.py::test_a_mark_of_no_row_is_refused"
RAISES = 'raise ValueError(f"marks name'
NOTICED = Mutation(HERE, RAISES, 'print(f"marks name', TEST, ("A2",))
MISSED = Mutation(HERE, '"""All rows, in the order of the file."""', "pass", TEST, ("A1",))
HANGS = Mutation(HERE, RAISES, 'import time; time.sleep(600); raise ValueError(f"marks name', TEST, ("A3",))


def test_a_test_that_notices_is_told_from_one_that_misses_and_one_that_only_reaches_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "HANG_SECONDS", 10)  # speed: of a test that takes a millisecond, or hangs
    missed, noticed, hung = [verdict for verdict in try_all([MISSED, NOTICED, HANGS]) if verdict]
    assert (missed.is_noticed, noticed.is_noticed, hung.is_noticed) == (False, True, False)
    assert "DID NOT RAISE" in noticed.says
    assert "Timeout" in hung.says


@pytest.mark.parametrize(
    ("printed", "is_hang"),
    [
        ("E   tests.support.patience.PatienceError: not true after 60 s", True),
        ("  |     tests.support.patience.PatienceError: not true after 60 s", True),
        ("E   Failed: Timeout (>240.0s) from pytest-timeout.", True),
        ("    raise PatienceError(text)", False),
        ("E   AssertionError: assert 'PatienceError' == 'x'", False),
    ],
)
def test_a_wait_at_its_limit_is_known_also_in_a_group_of_exceptions(printed: str, is_hang: bool) -> None:
    assert bool(copies.HANG.search(f"test_it.py:3: in test\n{printed}\n1 failed in 60 s")) is is_hang


def test_what_would_begin_after_the_limit_is_not_tried() -> None:
    assert list(try_all([NOTICED], limit_seconds=-1.0)) == [None]


CODE = """
LIMIT = 1

def other():
    return 1

class Pool:
    @property
    def put(self):
        return 2

    def get(self):
        return 3
"""
TESTS = "def test_put():\n    assert 2\n\n\ndef test_get():\n    assert 3\n"
LUA = 'local function one()\n  add("a")\nend\n\nlocal function two()\n  add("b")\nend\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pool.py").write_text(CODE)
    (tmp_path / "pool.lua").write_text(LUA)
    (tmp_path / "test_pool.py").write_text(TESTS)
    return tmp_path


PUT = Mutation("pool.py", "return 2", "return 0", "test_pool.py::test_put", ("A1",))
SECOND = Mutation("pool.lua", 'add("b")', "", "test_pool.py::test_put", invariant=1, guard="two")
WHOLE_FILE = replace(PUT, test="test_pool.py")
CONSTANT = replace(PUT, text="LIMIT = 1", without="LIMIT = 2")


@pytest.mark.parametrize(
    ("mutation", "file", "old", "new", "is_proven"),
    [
        (PUT, "pool.py", "return 1", "return 7", True),
        (PUT, "pool.py", "return 3", "return 7", True),
        (PUT, "pool.py", "LIMIT", "# moved\nLIMIT", True),
        (PUT, "pool.py", "        return 2", "        print()\n        return 2", False),
        (PUT, "pool.py", "@property", "@cached_property", False),
        (PUT, "test_pool.py", "assert 3", "assert 7", True),
        (PUT, "test_pool.py", "assert 2", "assert True", False),
        (WHOLE_FILE, "test_pool.py", "assert 3", "assert 7", False),
        (CONSTANT, "pool.py", "return 2", "return 7", True),
        (CONSTANT, "pool.py", "LIMIT = 1", "LIMIT = 1 + 0", False),
        (SECOND, "pool.lua", 'add("a")', 'add("c")', True),
        (SECOND, "pool.lua", "two()", "two(x)", False),
    ],
)
def test_a_proof_holds_until_its_function_or_its_test_changes(
    project: Path, mutation: Mutation, file: str, old: str, new: str, is_proven: bool
) -> None:
    before = proofs.digest(mutation, project)
    text = (project / file).read_text()
    assert text.count(old) == 1
    (project / file).write_text(text.replace(old, new))
    assert (proofs.digest(mutation, project) == before) is is_proven


@pytest.mark.parametrize("change", [{"without": "return 1"}, {"text": "return"}, {"test": "test_pool.py::test_get"}])
def test_a_proof_holds_for_one_mutation(project: Path, change: dict[str, Any]) -> None:
    assert proofs.digest(replace(PUT, **change), project) != proofs.digest(PUT, project)


@pytest.mark.parametrize("verdict", [Verdict(False, "1 passed"), None])
def test_the_gate_is_red_when_a_mutation_is_missed_or_has_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, verdict: Verdict | None
) -> None:
    monkeypatch.setattr(command, "load_mutations", lambda: [NOTICED])
    monkeypatch.setattr(command, "try_all", lambda mutations, limit_seconds: [verdict for _ in mutations])
    monkeypatch.setattr("sys.argv", ["mutations", "--gate"])
    monkeypatch.setattr(proofs, "FILE", tmp_path / "proven.json")
    with pytest.raises(SystemExit, match="run `make mutants`"):
        command.main()
    assert "1 of them to prove" in capsys.readouterr().out
    assert not proofs.FILE.exists()


def test_what_is_proven_is_not_proven_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "load_mutations", lambda: [NOTICED, MISSED])
    monkeypatch.setattr(command, "try_all", lambda mutations, _: [Verdict(True, "noticed") for _ in mutations])
    monkeypatch.setattr(command, "PAGE", tmp_path / "guards.md")
    monkeypatch.setattr(proofs, "FILE", tmp_path / "proven.json")
    monkeypatch.setattr("sys.argv", ["mutations"])
    command.main()
    command.main()
    assert "2 of them to prove" in (printed := capsys.readouterr().out)
    assert "0 of them to prove" in printed
    monkeypatch.setattr("sys.argv", ["mutations", "--all"])
    command.main()
    assert "2 of them to prove" in capsys.readouterr().out
