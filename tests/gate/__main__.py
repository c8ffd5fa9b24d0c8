"""Runs what a change must pass: `make gate`, or some parts of it: `make gate ONLY="unit runs"`.

First the form and the types. If they hold, all other parts, each to its end. Then each failed test of a part with
processes once more, alone: one that passes is FLAKY, is printed, and belongs on the list tests/flaky.yaml. A gate whose
parts have all passed leaves a stamp, named after the tree of HEAD, with the table that it printed.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, strftime

from tests.gate import flaky, soak
from tests.gate.landings import base, git
from tests.gate.lanes import Lanes, rerun
from tests.gate.parts import PARTS, Part
from tests.gate.results import FailedTest, Result, Verdict, table

RERUN_TESTS = 5
RERUN_SECONDS = 600.0
TESTS_FAILED = "exit code 1"
"""How a run of pytest ends whose only fault is failed tests."""
STAMPS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nexrl/gate"


def main() -> None:
    """Run the parts that the command line names, or all. Ends with code 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"only these of: {', '.join(part.name for part in PARTS)}")
    names = parser.parse_args().parts
    if unknown := set(names) - {part.name for part in PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    chosen = [part for part in PARTS if not names or part.name in names]
    folder = Path(tempfile.mkdtemp(prefix="nexrl-gate-"))
    say(f"logs and reports of the parts: {folder}")
    for line in soak.ages(soak.PAGE.read_text(), datetime.now(UTC).date()):
        say(line)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the parts, as Ctrl-C does
    before = committed_tree()
    results = run(chosen, Lanes(folder, say))
    if is_green(results) and not names:
        write_stamp(before, results)
    print_counts(results)
    sys.exit(0 if is_green(results) else 1)


def run(chosen: Sequence[Part], lanes: Lanes) -> list[Result]:
    """Run the chosen parts, print how they ended, and return their results."""
    began, known = monotonic(), flaky.load()
    first = lanes.run([part for part in chosen if part.is_first])
    if late := [*flaky.overdue(known), *flaky.not_listed(stamp_before(), known, flaky.load_at(base()))]:
        first.append(Result(flaky.LIST.name, Verdict.FAILED, why="; ".join(late)))
    others = [part for part in chosen if not part.is_first]
    if failed := [result.part for result in first if result.verdict is Verdict.FAILED]:
        why = f"{', '.join(failed)} failed"
        results = [*first, *(Result(part.name, Verdict.NOT_RUN, why=why) for part in others)]
    else:
        results = once_more(chosen, [*first, *lanes.run(others)], lanes, known)
    print_end(results, known)
    say(f"the gate is {'green' if is_green(results) else 'RED'} after {(monotonic() - began) / 60:.1f} minutes")
    return results


def is_green(results: Sequence[Result]) -> bool:
    """Return whether no part failed, and none could not run."""
    return all(result.verdict in (Verdict.PASSED, Verdict.SKIPPED) for result in results)


def once_more(
    parts: Sequence[Part], results: Sequence[Result], lanes: Lanes, known: Sequence[flaky.FlakyTest]
) -> list[Result]:
    """Run the failed tests of timed parts once more, alone, and return the results with what that changed."""
    by_name = {part.name: part for part in parts}
    changed = changed_files()
    wanted = {each.part: [test for test in each.failed if test.file not in changed] for each in results}
    ended = {each.part: each.why for each in results}
    wanted = {
        name: tests
        for name, tests in wanted.items()
        if tests and by_name[name].is_timed and ended[name] == TESTS_FAILED
    }
    number = sum(map(len, wanted.values()))
    if number == 0 or number > RERUN_TESTS:
        if number:
            say(f"{number} tests failed: none runs once more, because more than {RERUN_TESTS} are no accident")
        return list(results)
    after, end = [], monotonic() + RERUN_SECONDS
    for result in results:
        passed = [
            test
            for test in wanted.get(result.part, [])
            if passes_alone(by_name[result.part], test, lanes, end - monotonic()) and not is_third(test, known)
        ]
        after.append(result.after_rerun(tuple(passed)) if passed else result)
    return after


def passes_alone(part: Part, test: FailedTest, lanes: Lanes, limit_seconds: float) -> bool:
    """Run one test again, when nothing else runs. Return whether it passed within the limit."""
    say(f"once more, alone: {test.name}")
    again = lanes.run_one(rerun(part, [test.name], max(limit_seconds, 1.0)))
    return again.verdict is Verdict.PASSED and again.passed > 0


def is_third(test: FailedTest, known: Sequence[flaky.FlakyTest]) -> bool:
    """Return whether a test that passed alone is red all the same."""
    if not flaky.too_often(test, known):
        return False
    say(f"{test.name} passed alone, and is red: this is its time {flaky.MAX_TIMES} in {flaky.LIST.name}")
    return True


def print_end(results: Sequence[Result], known: Sequence[flaky.FlakyTest]) -> None:
    """Print every failed and flaky test, and the table."""
    for result in results:
        for test in result.flaky:
            print_line(f"\nFLAKY {test.name}: {test.cause}\n{test.traceback}")
            print_line(f"write this to {flaky.LIST.name}:\n{flaky.entry_for(test, known)}")
    print_line("")
    for result in results:
        for test in result.failed:
            print_line(f"FAILED {test.name}: {test.cause}")
    print_line(f"\n{table(results)}\n")


def print_counts(results: Sequence[Result]) -> None:
    """Print the counts of all tests; a part without tests counts as one."""
    verdicts = [result.verdict for result in results if not result.passed and not result.failed]
    passed = sum(each.passed + len(each.flaky) for each in results) + verdicts.count(Verdict.PASSED)
    failed = sum(len(each.failed) for each in results) + verdicts.count(Verdict.FAILED)
    print_line(f"{passed} passed, {failed} failed, {sum(each.skipped for each in results)} skipped")


def changed_files() -> set[str]:
    """Return the paths that this change adds or edits. A test in one of them gets no second run."""
    return set(git("diff", "--name-only", base()).splitlines())


def committed_tree() -> str:
    """Return the tree of HEAD; "" if the checkout differs from it."""
    return "" if git("status", "--porcelain") else git("rev-parse", "HEAD^{tree}").strip()


def write_stamp(tree: str, results: Sequence[Result]) -> None:
    """Record that the tree of HEAD has passed, if it was committed before the first part, and still is."""
    if not tree or committed_tree() != tree:
        say("no stamp: the checkout differs from HEAD, or did at the beginning")
        return
    STAMPS.mkdir(parents=True, exist_ok=True)
    path = STAMPS / tree
    skipped = [result.part for result in results if result.verdict is Verdict.SKIPPED]
    since = (
        f"{len(changed_files())} files changed since {base()}; parts that were skipped: {', '.join(skipped) or 'none'}"
    )
    head = f"{datetime.now(UTC).isoformat(timespec='seconds')} {git('rev-parse', 'HEAD').strip()}, {since}"
    before = path.read_text().splitlines() if path.exists() else []  # of this tree: what was FLAKY then stays so
    names = {line for line in before if line.startswith(flaky.MARK)}
    names |= {f"{flaky.MARK}{test.name}" for result in results for test in result.flaky}
    named = "".join(f"{line}\n" for line in sorted(names))
    path.write_text(f"{head}\n\n{table(results)}\n{named}")
    say(f"stamp: {path}, {since}")


def stamp_before() -> str:
    """Return the stamp of what landed before this change; "" if its gate did not run on this machine."""
    path = STAMPS / git("rev-parse", f"{base()}^{{tree}}").strip()
    return path.read_text() if path.exists() else ""


def say(text: str) -> None:
    """Print a line that begins with the time."""
    print_line(f"{strftime('%H:%M:%S')} {text}")


def print_line(text: str) -> None:
    """Print, at once also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
