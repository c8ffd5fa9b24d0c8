"""Runs tests 21 times, three at a time, beside two busy loops: a test that depends on luck fails.

python -m tests.gate.stress TESTS        these, however long it takes: what `make stress` calls
python -m tests.gate.stress --added      the test functions that this change adds, for 90 s: a part of the gate.
                                         It leaves out those in the folders LONG.
"""

import argparse
import ast
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from tests.gate import landings
from tests.gate.landings import base, git

ROUNDS = 7
WORKERS = 3
"""Each runs all the tests in each round."""
SECONDS = 90.0  # speed: what has no time is left to `make stress`, and said
LONG = ("e2e", "chaos", "kubernetes", "vllm", "gpu", "how_to")
"""Folders of tests that take minutes, or need more than `make setup` installs."""
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
NO_TESTS = 5
"""How pytest ends when each test is marked `soak`."""


def main() -> None:
    """Run the tests that the command line names, and end with code 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="folders, files, or node ids of pytest")
    parser.add_argument("--added", action="store_true", help="the test functions that this change adds, for 90 s")
    arguments = parser.parse_args()
    if arguments.tests:
        sys.exit(stress(arguments.tests, math.inf))
    if not arguments.added:
        parser.error("name tests, for example tests/integration/test_rpc.py")
    before = base()
    tests = added_tests(before)
    sys.stdout.write(f"{len(tests)} test functions are new since {before}\n")
    code = stress(["-m", "not soak", *tests], SECONDS) if tests else 0
    sys.exit(0 if code == NO_TESTS else code)


def added_tests(base: str) -> list[str]:
    """Return the node ids of the test functions that are not in the commit `base`, without those that take minutes."""
    tests = []
    changes = git(
        "diff", "--name-status", "--find-renames", "--diff-filter=AMR", base, "--", ":(glob)tests/**/test_*.py"
    )
    for status, *files in map(str.split, changes.splitlines()):
        if files[-1].split("/")[1] in LONG:
            continue
        before = [] if status == "A" else tests_in(git("show", f"{base}:{files[0]}"))
        tests += [
            f"{files[-1]}::{name}" for name in tests_in((landings.ROOT / files[-1]).read_text()) if name not in before
        ]
    return tests


def tests_in(text: str) -> list[str]:
    """Return the names of the tests that a file of Python defines."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


def stress(tests: Sequence[str], limit_seconds: float) -> int:
    """Run the tests in rounds, as many as fit into the limit, and at least one. None is cut short.

    Returns pytest's code of the first round that failed, or 0.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(WORKERS), "--dist", "each", *tests]
    began = monotonic()
    with busy_loops():
        for number in range(1, ROUNDS + 1):
            code = subprocess.run(command, check=False).returncode
            if code:
                return code
            spent = monotonic() - began
            if number < ROUNDS and spent + spent / number > limit_seconds:  # speed: only rounds that have time begin
                sys.stdout.write(f"{number} of {ROUNDS} rounds had time; run `make stress` for the rest\n")
                return 0
    sys.stdout.write(f"{ROUNDS} rounds of {WORKERS} have passed\n")
    return 0


@contextmanager
def busy_loops() -> Iterator[None]:
    """Keep two cores busy. The loops end with this process, whatever ends it."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main()
