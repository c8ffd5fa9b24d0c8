"""Tests that failed once in the gate and passed alone: tests/flaky.yaml. Each is a defect that is due to be mended."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.gate.landings import ROOT, git, landings_since
from tests.gate.results import FailedTest

LIST = ROOT / "tests/flaky.yaml"
DUE_LANDINGS = 5
"""Landings on main within which a test on the list must be mended."""
MARK = "FLAKY "
"""Begins the line of a stamp that names such a test."""
MAX_TIMES = 3
"""At this time a test that passes alone is red."""


@dataclass(frozen=True)
class FlakyTest:
    """A test on the list. It has failed `times` times, first at the commit `since`."""

    test: str
    since: str
    times: int
    error: str
    cause: str
    """"unknown", or why it fails."""


def load(path: Path = LIST) -> list[FlakyTest]:
    """Return the tests on the list. Raises TypeError for an entry with other keys."""
    return [FlakyTest(**entry) for entry in yaml.safe_load(path.read_text()) or []]


def overdue(known: Sequence[FlakyTest]) -> list[str]:
    """Return a line for each test that has been on the list for more than five landings."""
    landed = {entry.test: landings_since(entry.since) for entry in known}
    return [
        f"{test} is in {LIST.name} since {number} landings: mend its cause, and take it off the list"
        for test, number in landed.items()
        if number > DUE_LANDINGS
    ]


def not_listed(stamp: str, known: Sequence[FlakyTest]) -> list[str]:
    """Return a line for each test that was FLAKY in the gate of this stamp, still exists, and is not on the list."""
    listed = {entry.test for entry in known}
    names = [line.removeprefix(MARK) for line in stamp.splitlines() if line.startswith(MARK)]
    return [
        f"{name} was FLAKY when the commit before this change landed, and is not in {LIST.name}"
        for name in names
        if name not in listed and _exists(name)
    ]


def too_often(test: FailedTest, known: Sequence[FlakyTest]) -> bool:
    """Return whether this is the third time, so that the test is red although it passed alone."""
    return any(entry.test == test.name and entry.times + 1 >= MAX_TIMES for entry in known)


def entry_for(test: FailedTest, known: Sequence[FlakyTest]) -> str:
    """Return the entry of the list that the next change must write for this test."""
    before = next((entry for entry in known if entry.test == test.name), None)
    since, times = (before.since, before.times + 1) if before else (git("rev-parse", "--short=12", "HEAD").strip(), 1)
    cause = before.cause if before else "unknown"
    entry = {"test": test.name, "since": since, "times": times, "error": test.cause, "cause": cause}
    return yaml.safe_dump([entry], sort_keys=False, width=1000)


def _exists(name: str) -> bool:
    file, _, rest = name.partition("::")
    function = re.sub(r"\[.*", "", rest.rpartition("::")[2])
    return (ROOT / file).exists() and f"def {function}(" in (ROOT / file).read_text()
