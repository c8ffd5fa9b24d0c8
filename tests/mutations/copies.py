"""Takes a piece of text out of a copy of the project and runs one test there, which must fail.

The project itself is never changed.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.mutations.mutation import Mutation
from tests.support.marks import ROOT

COPIED = ("src", "services", "proto", "tests", "examples", "docs", "deploy", "pyproject.toml")
WORKERS = 2
TEST_SECONDS = 300
HANG_SECONDS = 240
"""Limit of one test on a copy. Reaching it is no failure of the test: on a slow machine any test may."""
HANG = re.compile(r"^[E|+ ]*(\S*PatienceError(:|$)|Failed: Timeout \(>).*", re.MULTILINE)
"""An error of a limit, in a group of exceptions as well."""
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "", "NEXRL_LEDGER_HISTORIES": "80"}
"""Some guards of the ledger are missed only after more random histories than `make test` tries. Compiled files are
kept: two versions of a file that are imported are more than a second apart, so Python tells them apart by their time.
"""


@dataclass(frozen=True)
class Verdict:
    """The result of the test on the changed copy."""

    is_noticed: bool
    says: str
    """The first error of the test, or the last line of pytest's output."""


def try_all(mutations: Sequence[Mutation], limit_seconds: float = math.inf) -> Iterator[Verdict | None]:
    """Yield a verdict for each mutation, in order; None for one that would begin after the limit.

    First their tests run on an unchanged copy, and must pass.
    """
    if not mutations:
        return
    end = time.monotonic() + limit_seconds
    with tempfile.TemporaryDirectory(prefix="nexrl-mutants-") as folder, ThreadPoolExecutor(WORKERS) as threads:
        copies: Queue[Path] = Queue()
        for number in range(WORKERS):
            copies.put(_copy(Path(folder) / str(number)))
        _check_unchanged(sorted({mutation.test for mutation in mutations}), copies.queue[0])
        yield from threads.map(lambda mutation: _try(mutation, copies, end), mutations)


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _check_unchanged(tests: Sequence[str], folder: Path) -> None:
    done = _pytest(folder, list(tests), TEST_SECONDS + 30 * len(tests))
    if done.returncode != 0:
        sys.exit(f"tests fail on an unchanged copy, so they prove nothing:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def _try(mutation: Mutation, copies: "Queue[Path]", end: float) -> Verdict | None:
    if time.monotonic() > end:  # speed: what has no time is said, and is red
        return None
    folder = copies.get()
    try:
        with _without(mutation, folder):
            return _verdict(mutation, folder)
    finally:
        copies.put(folder)


@contextmanager
def _without(mutation: Mutation, folder: Path) -> Iterator[None]:
    path = folder / mutation.path
    text = path.read_text()
    if text.count(mutation.text) != 1:
        sys.exit(
            f"{mutation.path}: {mutation.text!r} is there {text.count(mutation.text)} times; "
            "bring tests/mutations up to date"
        )
    path.write_text(text.replace(mutation.text, mutation.without))
    try:
        yield
    finally:
        path.write_text(text)


def _verdict(mutation: Mutation, folder: Path) -> Verdict:
    try:
        done = _pytest(folder, [mutation.test], TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"the test was not at its end after {TEST_SECONDS} s")
    if done.returncode not in (0, 1):
        sys.exit(
            f"{mutation.what}: pytest ended with code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    errors = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    hung = HANG.search(done.stdout)
    says = [*([hung[0].strip("E|+ ")] if hung else []), *errors, done.stdout.strip().splitlines()[-1]][0][:160]
    return Verdict(done.returncode == 1 and not hung, says)


def _pytest(folder: Path, tests: list[str], timeout: int) -> subprocess.CompletedProcess[str]:
    packages = [folder, folder / "src", *(folder / "services").iterdir()]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, packages))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-o", f"timeout={HANG_SECONDS}", *tests]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
