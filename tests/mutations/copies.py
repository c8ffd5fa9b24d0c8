"""Takes a piece of text out of a copy of the project and runs one test there, which must fail.

The project itself is never changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

PROJECT = Path(__file__).parents[2]
COPIED = ("src", "services", "proto", "tests", "examples", "docs", "deploy", "pyproject.toml")
WORKERS = 2
TEST_SECONDS = 300
HANG_SECONDS = 240
"""Limit of one test on a copy: one that hangs must fail, and so be noticed, before TEST_SECONDS have passed."""
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "", "NEXRL_LEDGER_HISTORIES": "80"}
"""Some guards of the ledger are missed only after more random histories than `make test` tries. Compiled files are
kept: two versions of a file that are imported are more than a second apart, so Python tells them apart by their time.
"""


@dataclass(frozen=True)
class Mutation:
    """`text` of `path`, which must occur once, becomes `without`; then `test` must fail."""

    what: str
    path: str
    text: str
    without: str
    test: str


@dataclass(frozen=True)
class Verdict:
    """The result of the test on the changed copy."""

    is_noticed: bool
    says: str
    """The first error of the test, or the last line of pytest's output."""


def try_all(mutations: Sequence[Mutation], must_pass: Sequence[str] = ()) -> Iterator[Verdict]:
    """One verdict for each mutation, in order. Tests in `must_pass` run first, on an unchanged copy, and must pass."""
    with tempfile.TemporaryDirectory(prefix="nexrl-mutants-") as folder, ThreadPoolExecutor(WORKERS) as threads:
        copies: Queue[Path] = Queue()
        for number in range(WORKERS):
            copies.put(_copy(Path(folder) / str(number)))
        if must_pass:
            _check_unchanged(must_pass, copies.queue[0])
        yield from threads.map(lambda mutation: _try(mutation, copies), mutations)


def commit_before(base: str) -> str | None:
    """Return the commit where this branch left `base`; None if `base` is not in this clone."""
    if not git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"):
        return None
    return git("merge-base", base, "HEAD").strip() or base


def files_changed(since: str) -> set[str]:
    """Return the paths of all files that differ from a commit."""
    return set(git("diff", "--name-only", "--relative", since).splitlines())


def git(*arguments: str) -> str:
    """Output of a git command; empty when it fails, or where there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for name in COPIED:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _check_unchanged(tests: Sequence[str], folder: Path) -> None:
    done = _pytest(folder, list(tests), TEST_SECONDS + 30 * len(tests))
    if done.returncode != 0:
        sys.exit(f"tests fail on an unchanged copy, so they prove nothing:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def _try(mutation: Mutation, copies: "Queue[Path]") -> Verdict:
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
    done = _pytest(folder, [mutation.test], TEST_SECONDS)
    if done.returncode not in (0, 1):
        sys.exit(
            f"{mutation.what}: pytest ended with code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    errors = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    return Verdict(done.returncode == 1, errors[0][:160] if errors else done.stdout.strip().splitlines()[-1])


def _pytest(folder: Path, tests: list[str], timeout: int) -> subprocess.CompletedProcess[str]:
    packages = [folder, folder / "src", *(folder / "services").iterdir()]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, packages))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-o", f"timeout={HANG_SECONDS}", *tests]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
