"""Takes features and guards out of a copy of the project, one at a time: a test must fail without each.

    python -m tests.mutations                     those that tests/mutations/proven.json lacks; writes it
    python -m tests.mutations --all               all, also those that are proven
    python -m tests.mutations credit returned     those whose description, file or test has all these words
    python -m tests.mutations --gate              those that proven.json lacks, for three minutes; writes nothing

Also writes docs/reference/guards.md. Ends with code 1 if a test passes without what it is there for, or if --gate had
no time for all.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.mutations import proofs
from tests.mutations.copies import Verdict, try_all
from tests.mutations.mutation import Mutation, load_mutations
from tests.support.marks import ROOT

GATE_SECONDS = 180.0
PAGE = ROOT / "docs/reference/guards.md"
HEADER = """# Guards

Each invariant of [the ledger](../../ARCHITECTURE.md) stands on guards in its code. `make mutants ALL=1` takes each out
in a copy of the project, runs its test there, and fails when that test still passes. What it saw:

| invariant | guard | taken out of | test | which then says |
|---|---|---|---|---|
"""


def main() -> None:
    """Try the mutations that the command line selects, several at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose description, file or test has all these words")
    parser.add_argument("--all", action="store_true", help="also those that are proven")
    parser.add_argument("--gate", action="store_true", help="for three minutes; write nothing")
    arguments = parser.parse_args()
    try:
        mutations = load_mutations()
    except ValueError as error:
        sys.exit(str(error))
    known, digests = proofs.load(), {each: proofs.digest(each) for each in mutations}
    chosen = [
        each
        for each in mutations
        if (arguments.all or digests[each] not in known) and _has_words(each, arguments.words)
    ]
    say(f"{len(mutations)} mutations, {len(chosen)} of them to prove")
    missed = late = 0
    for number, (mutation, verdict) in enumerate(zip(chosen, tried(chosen, arguments.gate), strict=True), 1):
        say(f"{number}/{len(chosen)} {line(mutation, verdict)}")
        late += verdict is None
        missed += verdict is not None and not verdict.is_noticed
        known.pop(digests[mutation], None)
        if verdict is not None and verdict.is_noticed:
            known[digests[mutation]] = verdict.says
        if not arguments.gate:
            proofs.write(known, digests)
    if not arguments.gate:
        PAGE.write_text(page(digests, known))
    if missed or late:
        sys.exit(f"{missed} of {len(chosen)} mutations are not noticed, {late} were not tried: run `make mutants`")
    say("all are noticed")


def tried(mutations: Sequence[Mutation], is_gate: bool) -> Iterator[Verdict | None]:
    """Yield the verdicts; None for those for which the gate has no time."""
    return try_all(mutations, GATE_SECONDS if is_gate else math.inf)


def line(mutation: Mutation, verdict: Verdict | None) -> str:
    """Return how a mutation ended."""
    without = f"{mutation.what} without {mutation.text!r}"
    if verdict is None:
        return f"NOT TRIED: {without}"
    if verdict.is_noticed:
        return f"noticed: {without}: {verdict.says}"
    return f"NOT NOTICED: {without} in {mutation.path}, {mutation.test}: {verdict.says}"


def page(digests: Mapping[Mutation, str], known: proofs.Proofs) -> str:
    """Return the page of the ledger's guards."""
    guards = sorted((each for each in digests if each.guard), key=lambda each: each.invariant)
    return HEADER + "".join(_row(each, known.get(digests[each], "NOT PROVEN")) for each in guards)


def say(text: str) -> None:
    """Print a line, at once also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _has_words(mutation: Mutation, words: Sequence[str]) -> bool:
    return all(word in f"{mutation.what} {mutation.path} {mutation.test}" for word in words)


def _row(guard: Mutation, says: str) -> str:
    shown = says.replace("|", "\\|").replace("`", "'")
    test = guard.test.removeprefix("tests/").replace("::", ": ")
    return f"| {guard.invariant} | {guard.guard} | {Path(guard.path).name} | {test} | `{shown}` |\n"


if __name__ == "__main__":
    main()
