"""Tests that failed once in the gate and passed alone: tests/flaky.yaml. Each is a defect that is due to be mended."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.gate.landings import ROOT, base, git, landings_since
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
    """A test on the list. It has failed `times` times, first in the change after the commit `since`."""

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
        f"{test} is in {LIST.name} for {number} landings: mend its cause, and take it off the list"
        if number is not None
        else f"{test}: since in {LIST.name} is no commit of this clone"
        for test, number in landed.items()
        if number is None or number > DUE_LANDINGS
    ]


def load_at(commit: str) -> list[FlakyTest]:
    """Return the tests that were on the list in a commit."""
    return [FlakyTest(**entry) for entry in yaml.safe_load(git("show", f"{commit}:tests/{LIST.name}")) or []]


def not_listed(stamp: str, known: Sequence[FlakyTest], before: Sequence[FlakyTest]) -> list[str]:
    """Return a line for each test that was FLAKY in the gate of this stamp, still exists, and has no new entry.

    `before` is the list at the commit of the stamp.
    """
    times = {entry.test: entry.times for entry in before}
    listed = {entry.test for entry in known if entry.times > times.get(entry.test, 0)}
    names = [line.removeprefix(MARK) for line in stamp.splitlines() if line.startswith(MARK)]
    return [
        f"{name} was FLAKY in the gate before this change: write the entry that it printed to {LIST.name}"
        for name in names
        if name not in listed and _exists(name)
    ]


def too_often(test: FailedTest, known: Sequence[FlakyTest]) -> bool:
    """Return whether this is the third time, so that the test is red although it passed alone."""
    return any(entry.test == test.name and entry.times + 1 >= MAX_TIMES for entry in known)


def entry_for(test: FailedTest, known: Sequence[FlakyTest]) -> str:
    """Return the entry of the list that the next change must write for this test."""
    before = next((entry for entry in known if entry.test == test.name), None)
    since, times = (before.since, before.times + 1) if before else (git("rev-parse", "--short=12", base()).strip(), 1)
    cause = before.cause if before else "unknown"
    entry = {"test": test.name, "since": since, "times": times, "error": test.cause, "cause": cause}
    return yaml.safe_dump([entry], sort_keys=False, width=1000)


def _exists(name: str) -> bool:
    file, *_, function = re.sub(r"\[.*", "", name).split("::")
    return (ROOT / file).exists() and f"def {function}(" in (ROOT / file).read_text()
