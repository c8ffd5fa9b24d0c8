"""Runs what is too long for the gate, and records how it ended in docs/reference/soak.md.

python -m tests.gate.soak AREA COMMAND...      what `make soak-AREA` calls
"""

import subprocess
import sys
from datetime import UTC, date, datetime
from time import monotonic

from tests.gate.landings import ROOT

PAGE = ROOT / "docs/reference/soak.md"
NEVER = "never"
"""The date of an area that has not run since the page exists."""
COLUMNS = 6
MAX_RESULT = 120
"""Characters of the last line that the command printed."""


def main() -> None:
    """Run the command, show its output, write the row of the area, and end with the command's code."""
    area, *command = sys.argv[1:]
    if area not in {row[0] for row in map(_cells, PAGE.read_text().splitlines()) if row}:
        sys.exit(f"{PAGE.relative_to(ROOT)} has no row for {area}; add one with what it runs")
    commit, began, last = _commit(), monotonic(), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if not line.startswith("make"):
                last = line.strip(" =\n") or last
    seconds = f"{monotonic() - began:.0f}"
    result = f"{verdict(process.returncode, last)}: {last}"
    PAGE.write_text(recorded(PAGE.read_text(), area, commit, datetime.now(UTC).date(), seconds, result))
    sys.exit(process.returncode)


def verdict(code: int, last: str) -> str:
    """Return how a command ended: pytest also ends with 0 if all its tests were skipped."""
    if code:
        return f"FAILED, exit code {code}"
    return "SKIPPED" if " skipped" in last and " passed" not in last else "passed"


def recorded(page: str, area: str, commit: str, day: date, seconds: str, result: str) -> str:
    """Return the page with a new row for the area."""
    lines = page.splitlines()
    for number, cells in enumerate(map(_cells, lines)):
        if cells and cells[0] == area:
            row = (area, cells[1], commit, day.isoformat(), seconds, result.replace("|", "/")[:MAX_RESULT])
            lines[number] = f"| {' | '.join(row)} |"
    return "\n".join(lines) + "\n"


def ages(page: str, today: date) -> list[str]:
    """Return a line for each area: how long ago it ran, and how it ended."""
    lines = []
    for area, _, commit, day, _, result in filter(None, map(_cells, page.splitlines())):
        if day == NEVER:
            lines.append(f"soak-{area}: never recorded")
        elif day[:1].isdigit():
            lines.append(f"soak-{area}: {(today - date.fromisoformat(day)).days} days ago at {commit}: {result}")
    return lines


def _cells(line: str) -> list[str]:
    """Return the six cells of a row; [] for a line that is none."""
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    return cells if len(cells) == COLUMNS else []


def _commit() -> str:
    """Return the commit, with `-dirty` if another file than the page differs from it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = ["git", "status", "--porcelain", "--", ".", f":!{PAGE.relative_to(ROOT)}"]
    is_dirty = subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return commit.stdout.strip() + ("-dirty" if is_dirty else "")


if __name__ == "__main__":
    main()
