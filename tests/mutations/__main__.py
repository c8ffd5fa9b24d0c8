"""Takes out every guard in a copy of the project and runs its test there; writes docs/reference/guards.md.

    python -m tests.mutations                     all guards
    python -m tests.mutations credit returned     those whose description has all these words
    python -m tests.mutations --base main         those of which the file or the test has changed since `main`

Ends with code 1 when a test still passes without the guard that it is there for.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.copies import PROJECT, Mutation, Verdict, commit_before, files_changed, try_all
from tests.mutations.guard import Guard
from tests.mutations.guards import GUARDS

LISTS = {f"tests/mutations/{name}_guards.py" for name in ("sample", "step", "refill", "sampler")}
PAGE = PROJECT / "docs/reference/guards.md"
HEADER = """# Guards

Each invariant of [the ledger](../../ARCHITECTURE.md) stands on guards in its code. `make mutants` takes each out in a
copy of the project, runs its test there, and fails when that test still passes. What it saw:

| invariant | guard | taken out of | test | which then says |
|---|---|---|---|---|
"""


def main() -> None:
    """Try the guards that the command line selects, several at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only guards whose description has all these words")
    parser.add_argument(
        "--base", default="", help="only guards of which the file or the test has changed since this commit"
    )
    arguments = parser.parse_args()
    guards = [guard for guard in GUARDS if all(word in guard.what for word in arguments.words)]
    if arguments.base:
        guards = changed_guards(guards, arguments.base)
    mutations = [Mutation(guard.what, guard.path, guard.text, guard.without, guard.test) for guard in guards]
    verdicts = []
    for guard, verdict in zip(guards, try_all(mutations), strict=True):
        verdicts.append(verdict)
        mark = "noticed" if verdict.is_noticed else "NOT NOTICED"
        sys.stdout.write(f"{len(verdicts)}/{len(guards)} {mark}: without '{guard.what}': {verdict.says}\n")
        sys.stdout.flush()
    if guards == list(GUARDS):
        PAGE.write_text(HEADER + "".join(map(_row, guards, verdicts)))
    missed = sum(not verdict.is_noticed for verdict in verdicts)
    if missed:
        sys.exit(f"{missed} of {len(guards)} guards can be taken out and no test notices")


def changed_guards(guards: Sequence[Guard], base: str) -> list[Guard]:
    """Those whose file, test file or list differs from the commit where this branch left `base`."""
    since = commit_before(base)
    if since is None:
        sys.stdout.write(f"commit {base} is not in this clone: no guard is tried\n")
        return []
    files = files_changed(since)
    changed = [guard for guard in guards if files & {guard.path, guard.test.partition("::")[0], *LISTS}]
    sys.stdout.write(f"{len(changed)} of {len(guards)} guards may have changed since {since[:9]}\n")
    return changed


def _row(guard: Guard, verdict: Verdict) -> str:
    says = (verdict.says if verdict.is_noticed else "NOTHING").replace("|", "\\|").replace("`", "'")
    test = guard.test.removeprefix("tests/").replace("::", ": ")
    return f"| {guard.invariant} | {guard.what} | {Path(guard.path).name} | {test} | `{says}` |\n"


if __name__ == "__main__":
    main()
