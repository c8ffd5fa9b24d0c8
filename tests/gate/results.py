"""What a part of the gate ended with: its verdict, the counts of its tests, and the tests that failed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from xml.etree import ElementTree

MAX_CAUSE = 160
"""Characters of an error in the table."""


class Verdict(Enum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class FailedTest:
    """A test that failed. `name` is its pytest node id."""

    name: str
    cause: str
    """The first line of its error."""
    traceback: str

    @property
    def file(self) -> str:
        """The path of its file, relative to the repository."""
        return self.name.partition("::")[0]


@dataclass(frozen=True)
class Result:
    """How a part ended, after `seconds`."""

    part: str
    verdict: Verdict
    seconds: float = 0.0
    why: str = ""
    """Why it was skipped or not run, or how its process ended."""
    passed: int = 0
    skipped: int = 0
    failed: tuple[FailedTest, ...] = field(default=())
    flaky: tuple[FailedTest, ...] = field(default=())
    """Tests that failed, and passed when they ran once more, alone."""

    def with_tests_of(self, report: Path) -> "Result":
        """Return this result with the tests that a JUnit XML report lists. Without a report, itself."""
        if not report.exists():
            return self
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))  # pytest has written it
        failed: dict[str, FailedTest] = {}
        for case in filter(None, map(_failure, cases)):
            failed.setdefault(case.name, case)  # an error of its end comes second
        skipped = sum(each.find("skipped") is not None for each in cases)
        passed = len(cases) - skipped - sum(_failure(each) is not None for each in cases)
        return replace(self, passed=passed, skipped=skipped, failed=tuple(failed.values()))

    def after_rerun(self, flaky: tuple[FailedTest, ...]) -> "Result":
        """Return the result when `flaky`, some of its failed tests, have passed alone."""
        left = tuple(test for test in self.failed if test not in flaky)
        if left:
            return replace(self, failed=left, flaky=flaky)
        return replace(self, verdict=Verdict.PASSED, why="", failed=(), flaky=flaky)


def _failure(case: ElementTree.Element) -> FailedTest | None:
    found = case.find("failure")
    if found is None:
        found = case.find("error")
    if found is None:
        return None
    cause = (found.get("message") or "").strip().splitlines()
    return FailedTest(node_id(case), cause[0][:MAX_CAUSE] if cause else "", found.text or "")


def node_id(case: ElementTree.Element) -> str:
    """Return pytest's name of a test from its element in a report of the family xunit1, without its group of xdist."""
    file, name = case.get("file", ""), re.sub(r"@[^]]*$", "", case.get("name", ""))
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".").split(".")
    return "::".join([file, *filter(None, classes), name])


def table(results: Sequence[Result]) -> str:
    """Return the table at the end of the gate, in Markdown."""
    rows = ["| part | verdict | seconds | passed | failed | flaky | skipped |", "|---|---|---|---|---|---|---|"]
    for each in results:
        verdict = f"{each.verdict.value}: {each.why}" if each.why else each.verdict.value
        counts = (f"{each.seconds:.0f}", each.passed, len(each.failed), len(each.flaky), each.skipped)
        rows.append(f"| {each.part} | {verdict} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows)
