"""`make gate-form` runs every check, and lists all failures at its end."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.form.__main__ import Check, checks, run
from tests.gate import soak
from tests.gate.flaky import load
from tests.support.marks import ROOT


def python(name: str, code: str) -> Check:
    return Check(name, [sys.executable, "-c", code])


def test_all_checks_run_and_the_output_of_those_that_fail_is_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    failing = [python(f"check {number}", f"print('said {number}'); raise SystemExit(1)") for number in range(3)]
    assert run([*failing, python("good", "print('hidden')"), Check("no program", ["no-such-program"])]) == 1
    began, *ended = capsys.readouterr().out.split("\n---")
    assert began.count("FAILED") == 4
    assert "ok      good" in began
    assert all(f"check {number}\nsaid {number}\n" in "".join(ended) for number in range(3))
    assert "hidden" not in "".join(ended)
    assert "no-such-program" in "".join(ended)


def test_a_check_that_cannot_run_here_is_skipped_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([Check("helm lint: no helm"), python("good", "")]) == 0
    assert "skipped helm lint: no helm" in capsys.readouterr().out


def test_variables_of_a_git_hook_do_not_reach_the_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert run([python("git", "import os; raise SystemExit('GIT_DIR' in os.environ)")]) == 0
    assert "GIT_DIR" in os.environ


def test_without_helm_and_without_the_base_the_other_checks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.form.__main__.helms", list)
    found = checks("no-such-commit")
    skipped = [check.name for check in found if not check.command]
    assert skipped == ["buf breaking: no-such-commit is not in this clone", "helm lint: no helm"]
    assert len(found) > 10


def test_the_list_of_flaky_tests_names_tests_that_exist() -> None:
    for entry in load():
        path, *_, name = entry.test.split("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_each_area_of_soak_has_a_target_and_a_row() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| .* \|$", soak.PAGE.read_text(), re.MULTILINE)
    (areas,) = re.findall(r"^AREAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rows == ["area", *areas.split()]
