"""The gate: form ends it, all other parts run to their end, and a test that passes alone is never green in silence."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from tests.gate import __main__ as gate
from tests.gate import flaky, landings
from tests.gate.flaky import FlakyTest, entry_for, load, not_listed, overdue, too_often
from tests.gate.lanes import Lanes
from tests.gate.parts import CHAOS, PARTS, Part
from tests.gate.results import FailedTest, Result, Verdict, table
from tests.gate.soak import ages, recorded
from tests.gate.soak import verdict as soak_verdict
from tests.support.chaos import NAMES, schedule

FAILS_ONCE = """
from pathlib import Path

def test_fails_once():
    mark = Path(__file__).with_name("ran")
    was_there = mark.exists()
    mark.touch()
    assert was_there, "the first time"

def test_passes():
    pass
"""
ONE_GROUP = """
from pathlib import Path

import pytest

@pytest.mark.xdist_group("one fixture")
@pytest.mark.parametrize("name", "a@b c d e f".split())
def test_where(name, worker_id):
    workers = Path(__file__).with_name("workers")
    is_first = not workers.exists()
    with workers.open("a") as file:
        file.write(f"{worker_id} ")
    assert not is_first, "the first one"
"""
CRASHES_BESIDE_OTHERS = """
import os

import pytest

@pytest.mark.xdist_group("one")
def test_it():
    "PYTEST_XDIST_WORKER" in os.environ and os._exit(1)

@pytest.mark.xdist_group("one")
def test_other():
    pass
"""
HANG_SECONDS = 20  # speed: of a part that hangs; within it, Python starts
FAILS = "def test_always_fails():\n    assert 1 == 2\n"


Run = Callable[[Sequence[Part]], bool]


@pytest.fixture
def said() -> list[str]:
    """The lines that the gate printed."""
    return []


@pytest.fixture
def run(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run these parts as the gate does, and return whether it is green."""
    monkeypatch.setattr(gate, "print_line", said.append)
    monkeypatch.setattr(gate, "changed_files", set)
    monkeypatch.setattr(gate, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(flaky, "load", list)
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)

    def run_gate(parts: Sequence[Part]) -> bool:
        results = gate.run(parts, Lanes(folder, said.append))
        gate.print_counts(results)
        return gate.is_green(results)

    return run_gate


def command(name: str, code: str, **more: object) -> Part:
    return Part(name, 60, (sys.executable, "-c", code), **more)  # type: ignore[arg-type]


def timed(source: str) -> Part:
    """A part with these tests, which are a file of the current folder."""
    Path("test_it.py").write_text(source)
    return Part("timed", 120, tests=["test_it.py"], is_timed=True)


def verdicts(said: Sequence[str]) -> dict[str, str]:
    """The verdict of each part in the printed table."""
    lines = [line for text in said for line in text.splitlines() if line.startswith("| ")]
    return {cells[1]: cells[2] for cells in (list(map(str.strip, line.split("|"))) for line in lines)}


def test_a_fault_of_form_ends_the_gate_and_the_other_first_part_is_shown_too(run: Run, said: list[str]) -> None:
    parts = [
        command("form", "raise SystemExit('a wrong page')", is_first=True),
        command("types", "raise SystemExit('a wrong type')", is_first=True, lane=2),
        command("unit", ""),
    ]
    assert not run(parts)
    assert any("a wrong page" in line for line in said)
    assert any("a wrong type" in line for line in said)
    assert verdicts(said)["unit"] == "not run: form, types failed"


def test_every_other_part_runs_to_its_end_and_the_gate_is_red(run: Run, said: list[str]) -> None:
    parts = [
        command("first", "raise SystemExit(3)"),
        command("second", ""),
        command("build", "raise SystemExit(1)", lane=2),
        command("cluster", "", lane=2, after=["build"]),
    ]
    assert not run(parts)
    seen = verdicts(said)
    assert seen["first"] == "FAILED: exit code 3"
    assert seen["second"] == "passed"
    assert seen["cluster"] == "not run: build: FAILED"


def test_a_part_that_needs_a_skipped_one_is_skipped_for_its_own_reason(
    run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    parts = [
        Part("images", 60, ("false",), lane=2, needs=["KUBECONFIG"]),
        Part("cluster", 60, ("false",), lane=2, after=["images"], needs=["KUBECONFIG"]),
    ]
    assert run(parts)
    assert verdicts(said)["cluster"] == "skipped: KUBECONFIG is not set"


def test_a_part_that_hangs_is_ended_with_what_it_started(run: Run, said: list[str], tmp_path: Path) -> None:
    started = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib; child = subprocess.Popen(['sleep', '1000']); "
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid)); time.sleep(1000)"
    )
    assert not run([Part("hangs", HANG_SECONDS, (sys.executable, "-c", code))])
    assert verdicts(said)["hangs"] == f"FAILED: not at its end after {HANG_SECONDS} s"
    state = Path(f"/proc/{started.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_test_that_passes_alone_is_printed_as_flaky_and_the_gate_is_green(
    run: Run, said: list[str], tmp_path: Path
) -> None:
    assert run([timed(FAILS_ONCE)])
    printed = "\n".join(said)
    assert "FLAKY" in printed
    assert "the first time" in printed
    assert "write this to flaky.yaml" in printed
    assert "2 passed, 0 failed, 0 skipped" in printed


def test_the_tests_of_a_group_run_in_one_process_and_one_that_fails_is_found_again(
    run: Run, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    assert run([replace(timed(ONE_GROUP), workers=2)])
    assert any(line.endswith("once more, alone: test_it.py::test_where[a@b]") for line in said)
    workers = (tmp_path / "workers").read_text().split()
    assert workers == [*[workers[0]] * 5, "master"]


def test_a_tree_is_stamped_only_if_it_was_committed_from_the_beginning(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "print_line", said.append)
    monkeypatch.setattr(gate, "STAMPS", tmp_path)
    monkeypatch.setattr(gate, "changed_files", set)
    tree = landings.git("rev-parse", "HEAD^{tree}").strip()
    monkeypatch.setattr(gate, "committed_tree", lambda: tree)
    results = [Result("unit", Verdict.PASSED, 3.0, passed=7)]
    for before in ("", "another tree"):
        gate.write_stamp(before, results)
    assert not list(tmp_path.iterdir())
    gate.write_stamp(tree, results)
    assert "| unit | passed | 3 | 7 |" in (tmp_path / tree).read_text()


def test_a_stamp_names_flaky_tests_and_skipped_parts(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "print_line", said.append)
    monkeypatch.setattr(gate, "STAMPS", tmp_path)
    monkeypatch.setattr(gate, "committed_tree", lambda: "tree")
    flaky = (FailedTest("tests/x.py::test_it", "why", ""),)
    gate.write_stamp("tree", [Result("unit", Verdict.PASSED, flaky=flaky), Result("scan", Verdict.SKIPPED)])
    lines = (tmp_path / "tree").read_text().splitlines()
    assert lines[0].endswith("parts that were skipped: scan")
    assert lines[-1] == "FLAKY tests/x.py::test_it"


def test_a_part_whose_tests_were_all_skipped_has_not_passed(run: Run, said: list[str], tmp_path: Path) -> None:
    assert run([timed("import pytest\n\n@pytest.mark.skip\ndef test_it():\n    pass\n")])
    assert verdicts(said)["timed"] == "skipped: each of its tests was skipped"


def test_a_part_that_has_lost_tests_is_red_also_if_the_one_that_crashed_passes_alone(
    run: Run, said: list[str], tmp_path: Path
) -> None:
    assert not run([replace(timed(CRASHES_BESIDE_OTHERS), workers=1)])
    assert verdicts(said)["timed"] == "FAILED: processes crashed, and tests were lost"


def test_a_test_that_fails_again_is_red(run: Run, said: list[str], tmp_path: Path) -> None:
    assert not run([timed(FAILS)])
    assert any(line.startswith("FAILED") and "test_always_fails" in line for line in said)
    assert "0 passed, 1 failed, 0 skipped" in said


def test_a_test_in_a_file_that_the_change_touches_gets_no_second_run(
    run: Run, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "changed_files", lambda: AnyFile())
    assert not run([timed(FAILS_ONCE)])
    assert not any("once more" in line for line in said)


class AnyFile(set[str]):
    """All files."""

    def __contains__(self, path: object) -> bool:
        return True


def test_more_than_five_failures_are_no_accident(run: Run, said: list[str], tmp_path: Path) -> None:
    source = "\n".join(f"def test_{number}():\n    assert False\n" for number in range(6))
    assert not run([timed(source)])
    assert any("none runs once more" in line for line in said)


def test_a_test_that_waits_for_no_process_gets_no_second_run(run: Run, said: list[str], tmp_path: Path) -> None:
    assert not run([replace(timed(FAILS_ONCE), is_timed=False)])


def test_the_third_time_a_flaky_test_is_red() -> None:
    test = FailedTest("tests/e2e/test_run.py::test_it", "why", "")
    known = [FlakyTest(test.name, "abc1234", 2, "why", "unknown")]
    assert too_often(test, known)
    assert not too_often(test, [])
    assert "times: 3" in entry_for(test, known)
    assert "since: abc1234" in entry_for(test, known)


def test_a_test_that_was_flaky_in_the_landing_before_must_be_on_the_list_or_be_gone() -> None:
    here = "tests/unit/gate/test_gate.py"
    names = [f"{here}::test_the_table_has_each_part[a]", f"{here}::test_that_is_gone", "tests/gone.py::test_it"]
    stamp = "2026-11-28 abc1234\n\n| unit | passed |\n" + "".join(f"FLAKY {name}\n" for name in names)
    (line,) = not_listed(stamp, [], [])
    assert line.startswith(names[0])
    once, twice = (FlakyTest(names[0], "abc1234", times, "why", "unknown") for times in (1, 2))
    assert not_listed(stamp, [once], []) == []
    assert not_listed(stamp, [twice], [once]) == []
    assert not_listed(stamp, [once], [once]) == [line]


def test_a_flaky_test_that_nobody_has_listed_is_red(run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = "FLAKY tests/unit/gate/test_gate.py::test_the_table_has_each_part\n"
    monkeypatch.setattr(gate, "stamp_before", lambda: stamp)
    assert not run([command("unit", "")])
    seen = verdicts(said)
    assert "test_the_table_has_each_part was FLAKY" in seen["flaky.yaml"]
    assert seen["unit"] == "not run: flaky.yaml failed"


def test_a_flaky_test_is_due_after_five_landings(monkeypatch: pytest.MonkeyPatch) -> None:
    landed = {"old": 6, "new": 5, "unknown": None}
    monkeypatch.setattr(flaky, "landings_since", landed.get)
    known = [FlakyTest(f"tests/{name}.py::test_it", name, 1, "why", "unknown") for name in landed]
    old, unknown = overdue(known)
    assert old.startswith("tests/old.py::test_it is in flaky.yaml for 6 landings")
    assert unknown.startswith("tests/unknown.py::test_it: since")


def test_the_kills_of_the_gate_are_of_each_kind_of_process() -> None:
    strikes = schedule(int(CHAOS["SEED"]), int(CHAOS["KILLS"]), NAMES)
    assert {strike.names[0].rstrip("-01") for strike in strikes} == {name.rstrip("-01") for name in NAMES}
    assert any(strike.gap_seconds == 0 for strike in strikes), "two at once"
    assert any(strike.forgets for strike in strikes if strike.names[0] == "redis")


def test_a_change_begins_where_it_left_main_or_before_the_landing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BASE", raising=False)
    monkeypatch.setattr(landings, "ROOT", tmp_path)
    git = landings.git
    git("init", "-q", "-b", "main")
    git("config", "user.email", "a@example.com")
    git("config", "user.name", "a")
    for message in ("begin", "first"):
        git("commit", "-q", "--allow-empty", "-m", message)
    landed = git("rev-parse", "HEAD").strip()
    git("checkout", "-q", "-b", "change")
    for message in ("one", "two"):
        git("commit", "-q", "--allow-empty", "-m", message)
    assert landings.base() == landed
    git("update-ref", "refs/remotes/origin/main", "main")
    git("branch", "-q", "-D", "main")
    assert landings.base() == landed
    git("branch", "-q", "main", landed)
    monkeypatch.setenv("BASE", "HEAD~1")
    assert landings.base() == "HEAD~1"
    monkeypatch.delenv("BASE")
    git("checkout", "-q", "main")
    git("merge", "-q", "--no-ff", "-m", "landing", "change")
    assert git("rev-parse", landings.base()).strip() == landed
    assert landings.landings_since(landed) == 1
    assert landings.landings_since("f" * 40) is None
    git("clone", "-q", "--depth=2", tmp_path.as_uri(), "shallow")
    monkeypatch.setattr(landings, "ROOT", tmp_path / "shallow")
    assert landings.landings_since("f" * 40) == 1, "it may be older than the clone"


def test_an_entry_of_the_list_is_read_as_it_was_printed(tmp_path: Path) -> None:
    path = tmp_path / "flaky.yaml"
    path.write_text(entry_for(FailedTest("tests/x.py::test_it[a: b]", "E: 'x'", ""), []))
    head = landings.git("rev-parse", "--short=12", landings.base()).strip()
    assert load(path) == [FlakyTest("tests/x.py::test_it[a: b]", head, 1, "E: 'x'", "unknown")]


def test_a_part_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert Part("cluster", 1, needs=["KUBECONFIG"]).missing == "KUBECONFIG is not set"
    assert Part("scan", 1, needs=["program:no-such-program"]).missing == "no-such-program is not on the PATH"


def test_parts_wait_only_for_parts_that_exist() -> None:
    names = {part.name for part in PARTS}
    assert {name for part in PARTS for name in part.after} <= names
    assert len(names) == len(PARTS)


def test_the_table_has_each_part() -> None:
    text = table([Result("unit", Verdict.PASSED, 3.2, passed=7), Result("scan", Verdict.SKIPPED, why="no helm")])
    assert "| unit | passed | 3 | 7 | 0 | 0 | 0 |" in text
    assert "| scan | skipped: no helm | 0 | 0 | 0 | 0 | 0 |" in text


def test_a_result_of_soak_is_recorded_in_its_row_and_has_an_age() -> None:
    page = "| area | what |\n|---|---|\n| fuzz | messages | never | never | | |\n| vllm | all | never | never | | |\n"
    page = recorded(page, "fuzz", "abc1234", date(2026, 11, 20), "412", "passed: 8 passed in 410 s")
    assert "| fuzz | messages | abc1234 | 2026-11-20 | 412 | passed: 8 passed in 410 s |" in page
    assert ages(page, date(2026, 11, 27)) == [
        "soak-fuzz: 7 days ago at abc1234: passed: 8 passed in 410 s",
        "soak-vllm: never recorded",
    ]


def test_a_soak_whose_tests_were_all_skipped_has_not_passed() -> None:
    assert soak_verdict(0, "8 passed, 1 skipped in 410 s") == "passed"
    assert soak_verdict(0, "9 skipped in 0.3 s") == "SKIPPED"
    assert soak_verdict(1, "1 failed in 2 s") == "FAILED, exit code 1"
