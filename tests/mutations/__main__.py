"""Takes out every guard in a copy of the project and runs its test there; writes docs/reference/guards.md.

Ends with code 1 when a test still passes without the guard that it is there for.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.mutations.guards import GUARDS, Guard

PROJECT = Path(__file__).parents[2]
COPIED = ("src", "services", "tests", "examples", "docs", "pyproject.toml")
PAGE = PROJECT / "docs/reference/guards.md"
WORKERS = 2
TEST_SECONDS = 300
HEADER = """# Guards

Each invariant of [the ledger](../../ARCHITECTURE.md) stands on guards in its code. `make mutants` takes each out in a
copy of the project, runs its test there, and fails when that test still passes. What it saw:

| invariant | guard | taken out of | test | which then says |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Verdict:
    """What a test said without its guard."""

    guard: Guard
    is_noticed: bool
    says: str


def main() -> None:
    """Try every guard, several at a time; with words on the command line, those whose description has them all."""
    guards = [guard for guard in GUARDS if all(word in guard.what for word in sys.argv[1:])]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="nexrl-mutants-") as folder, ThreadPoolExecutor(WORKERS) as threads:
        copies: Queue[Path] = Queue()
        for number in range(WORKERS):
            copies.put(_copy(Path(folder) / str(number)))
        for verdict in threads.map(lambda guard: _try(guard, copies), guards):
            verdicts.append(verdict)
            mark = "noticed" if verdict.is_noticed else "NOT NOTICED"
            sys.stdout.write(f"{len(verdicts)}/{len(guards)} {mark}: without '{verdict.guard.what}': {verdict.says}\n")
            sys.stdout.flush()
    if guards == list(GUARDS):
        PAGE.write_text(HEADER + "".join(map(_row, verdicts)))
    missed = [verdict for verdict in verdicts if not verdict.is_noticed]
    if missed:
        sys.exit(f"{len(missed)} of {len(guards)} guards can be taken out and no test notices")


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for name in COPIED:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _try(guard: Guard, copies: "Queue[Path]") -> Verdict:
    folder = copies.get()
    try:
        with _without(guard, folder):
            return _verdict(guard, folder)
    finally:
        copies.put(folder)


@contextmanager
def _without(guard: Guard, folder: Path) -> Iterator[None]:
    path = folder / guard.path
    text = path.read_text()
    if text.count(guard.text) != 1:
        sys.exit(
            f"{guard.path}: {guard.text!r} is there {text.count(guard.text)} times; bring tests/mutations up to date"
        )
    path.write_text(text.replace(guard.text, guard.without))
    try:
        yield
    finally:
        path.write_text(text)


def _verdict(guard: Guard, folder: Path) -> Verdict:
    packages = [folder, folder / "src", *(folder / "services").iterdir()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", guard.test]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(f"{guard.what}: pytest ended with code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    errors = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    return Verdict(guard, done.returncode == 1, errors[0][:160] if errors else done.stdout.strip().splitlines()[-1])


def _row(verdict: Verdict) -> str:
    guard = verdict.guard
    says = (verdict.says if verdict.is_noticed else "NOTHING").replace("|", "\\|").replace("`", "'")
    test = guard.test.removeprefix("tests/").replace("::", ": ")
    return f"| {guard.invariant} | {guard.what} | {Path(guard.path).name} | {test} | `{says}` |\n"


if __name__ == "__main__":
    main()
