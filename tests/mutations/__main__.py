"""Takes out every guard in a copy of the project and runs its test there; writes docs/reference/guards.md.

Ends with code 1 when a test still passes without the guard that it is there for.
"""

import sys
from pathlib import Path

from tests.mutations.copies import PROJECT, Mutation, Verdict, try_all
from tests.mutations.guard import Guard
from tests.mutations.guards import GUARDS

PAGE = PROJECT / "docs/reference/guards.md"
HEADER = """# Guards

Each invariant of [the ledger](../../ARCHITECTURE.md) stands on guards in its code. `make mutants` takes each out in a
copy of the project, runs its test there, and fails when that test still passes. What it saw:

| invariant | guard | taken out of | test | which then says |
|---|---|---|---|---|
"""


def main() -> None:
    """Try every guard, several at a time; with words on the command line, those whose description has them all."""
    guards = [guard for guard in GUARDS if all(word in guard.what for word in sys.argv[1:])]
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


def _row(guard: Guard, verdict: Verdict) -> str:
    says = (verdict.says if verdict.is_noticed else "NOTHING").replace("|", "\\|").replace("`", "'")
    test = guard.test.removeprefix("tests/").replace("::", ": ")
    return f"| {guard.invariant} | {guard.what} | {Path(guard.path).name} | {test} | `{says}` |\n"


if __name__ == "__main__":
    main()
