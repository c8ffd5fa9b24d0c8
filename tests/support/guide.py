"""Writes docs/reference/developer-guide.md: each promise of the guide, where it lives, and the tests that prove it.

Rows come from developer-guide.yaml beside the page, tests from `@pytest.mark.guide("H7")` marks (on a test, a class,
or a module's `pytestmark`), mutations from tests/mutations/rows. All are read from source; no test runs.

    python -m tests.support.guide            write the page
    python -m tests.support.guide --check    fail when it is not up to date
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import yaml

from tests.mutations.mutation import load_mutations
from tests.support.marks import ROOT, TESTS, find_tests

ROWS = ROOT / "docs/reference/developer-guide.yaml"
PAGE = ROOT / "docs/reference/developer-guide.md"
STATES = ("done", "not yet proven by a mutation", "untested", "by design", "open")

_PREAMBLE = """# The developer guide, row by row

What each component must offer, where it lives here, and the tests that prove it. Written by `make guide` from
[developer-guide.yaml](developer-guide.yaml), the `guide` marks of the tests, and the mutations in
`tests/mutations/rows`; do not edit.

- **done**: it is here, and a test fails when the feature is taken out of the code. That test is in bold;
  `make mutants` takes the feature out and runs it.
- **not yet proven by a mutation**: it is here, and a test is marked with the row. Nothing shows yet that the test
  would fail without the feature.
- **untested**: it is here; no test is marked with the row.
- **by design**: done in another way, which the page names; no test is marked with the row.
- **open**: all or part of it is missing; the page says what.
"""


@dataclass(frozen=True)
class Row:
    """One promise. `where` begins with "open:" while all or part of it is missing."""

    row_id: str
    section: str
    item: str
    where: str


def main() -> None:
    """Write the page, or with `--check` compare it."""
    parser = argparse.ArgumentParser(description="Write docs/reference/developer-guide.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is not up to date")
    is_check = parser.parse_args().check
    page = render(load_rows(), find_tests(TESTS), proving_tests())
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


def proving_tests() -> dict[str, set[str]]:
    """By row, the tests that must fail when the feature of the row is taken out."""
    tests: dict[str, set[str]] = defaultdict(set)
    for mutation in load_mutations():
        for row_id in mutation.rows:
            tests[row_id].add(mutation.test.partition("[")[0])
    return dict(tests)


def render(rows: Sequence[Row], tests: Mapping[str, Sequence[str]], proving: Mapping[str, Set[str]]) -> str:
    """The page. Raises ValueError for a mark that names no row."""
    unknown = set(tests) - {row.row_id for row in rows}
    if unknown:
        raise ValueError(f"marks name rows that do not exist: {', '.join(sorted(unknown))}")
    states = {row.row_id: _state(row, tests.get(row.row_id, ()), row.row_id in proving) for row in rows}
    lines = [_PREAMBLE, *_summary(states)]
    for section in dict.fromkeys(row.section for row in rows):
        lines += ["", f"## {section}", "", "| row | item | here | proved by | state |", "|---|---|---|---|---|"]
        for row in rows:
            if row.section == section:
                proofs = _proofs(tests.get(row.row_id, ()), proving.get(row.row_id, frozenset()))
                lines.append(f"| {row.row_id} | {row.item} | {row.where} | {proofs} | {states[row.row_id]} |")
    return "\n".join(lines) + "\n"


def _summary(states: Mapping[str, str]) -> Iterator[str]:
    counts = Counter(states.values())
    yield f"Of {len(states)} rows: " + "; ".join(f"{counts[state]} {state}" for state in STATES)
    open_rows = [row_id for row_id, state in states.items() if state == "open"]
    yield f"\nOpen: {', '.join(open_rows) or 'none'}"


def _state(row: Row, tests: Sequence[str], is_proven: bool) -> str:
    if row.where.startswith("open:"):
        return "open"
    if tests:
        return "done" if is_proven else "not yet proven by a mutation"
    return "by design" if row.where.startswith("by design") else "untested"


def _proofs(tests: Sequence[str], proving: Set[str]) -> str:
    links = []
    for test in tests:
        path, _, name = test.partition("::")
        link = f"[{name.rpartition('::')[2]}](../../{path})"
        links.append(f"**{link}**" if test in proving else link)
    return "<br>".join(links)


if __name__ == "__main__":
    main()
