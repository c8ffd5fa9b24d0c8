"""Checks the form of the repository: `make gate-form`. Needs only .venv, and takes less than 30 s on two idle cores.

Runs all checks, also after a failure, two at a time. Prints one line for each check, and then the output of those that
failed. Exits with 1 if a check failed.

    python -m tests.form               the protos are compared with those of the commit where HEAD left `main`
    python -m tests.form --base REF    the protos are compared with those of the commit where this branch left REF
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.gate.landings import base
from tests.support.helm import CHART, helms
from tests.support.marks import ROOT

BIN = Path(sys.executable).parent
PYTHON = str(BIN / "python")
PYTEST_OPTIONS = ("-n", "2", "--dist", "worksteal", "-q", "--tb=short", "--continue-on-collection-errors")
SERVICES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "services").iterdir())
DEPTRY = (str(BIN / "deptry"), "--no-ansi", "--optional-dependencies-dev-groups")
"""The next argument names extras whose packages the code may not import."""
OF_A_LOCAL_RUN = (
    "--extend-exclude",
    "src/nexrl/(v1|k8s)",
    "src",
    *(name for name in SERVICES if "operator" not in name),
)
AT_ONCE = 2
CHECK_SECONDS = 300
"""Only ends a check that hangs."""


@dataclass(frozen=True)
class Check:
    """A command that must exit with 0. A check without a command is skipped; its name says why."""

    name: str
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a check."""

    word: str
    check: Check
    seconds: float = 0.0
    output: str = ""


def main() -> None:
    """Run all checks; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=base(), help="the protos must be compatible with those of this commit")
    sys.exit(run(checks(parser.parse_args().base)))


def checks(base: str) -> list[Check]:
    """Return all checks, the longest first."""
    return [
        Check("tests of form", [PYTHON, "-m", "pytest", *PYTEST_OPTIONS, "tests/form"]),
        Check("developer guide", [PYTHON, "-m", "tests.support.guide", "--check"]),
        Check("reference pages and CRD", [PYTHON, "-m", "nexrl.spec", "--check"]),
        Check("table of sizes", [PYTHON, "-m", "nexrl.plan.table", "--check"]),
        Check("stubs", ["make", "--silent", "proto-check"]),
        Check("ruff check", [str(BIN / "ruff"), "check", "--output-format=concise"]),
        Check("ruff format", [str(BIN / "ruff"), "format", "--check"]),
        Check("import rules", [str(BIN / "lint-imports")]),
        Check("dependencies", [*DEPTRY, "dev", "src", *SERVICES]),
        Check("dependencies of a local run", [*DEPTRY, "dev,operator,kubernetes", *OF_A_LOCAL_RUN]),
        Check("buf lint", [str(BIN / "buf"), "lint"]),
        _breaking(base),
        *_lints_of_the_chart(),
    ]


def run(checks: Sequence[Check]) -> int:
    """Run the checks, print what became of them, and return the exit code."""
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = []
        for future in as_completed([threads.submit(_outcome, check) for check in checks]):
            outcomes.append(future.result())
            _write(f"{outcomes[-1].word:7} {outcomes[-1].check.name}  {outcomes[-1].seconds:.1f} s")
    failed = [outcome for outcome in outcomes if outcome.word == "FAILED"]
    for outcome in failed:
        _write(f"\n--- {outcome.check.name}\n{outcome.output.rstrip()}")
    names = ", ".join(outcome.check.name for outcome in failed)
    verdict = f"FAILED: {names}; `make fix` writes what can be written" if failed else "ok"
    _write(f"\nform: {verdict} ({time.monotonic() - began:.0f} s)")
    return int(bool(failed))


def _breaking(base: str) -> Check:
    done = subprocess.run(["git", "merge-base", base, "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return Check(f"buf breaking: {base} is not in this clone")
    return Check("buf breaking", [str(BIN / "buf"), "breaking", "--against", f".git#ref={done.stdout.strip()}"])


def _lints_of_the_chart() -> list[Check]:
    programs = helms()
    if not programs:
        return [Check("helm lint: no helm")]
    return [Check(f"{program} lint", [program, "lint", "--strict", str(CHART)]) for program in programs]


def _outcome(check: Check) -> Outcome:
    if not check.command:
        return Outcome("skipped", check)
    began = time.monotonic()
    try:
        done = subprocess.run(
            check.command,
            cwd=ROOT,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
        word, output = "FAILED" if done.returncode else "ok", done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        word, output = "FAILED", str(error)
    return Outcome(word, check, time.monotonic() - began, output)


def _environment() -> dict[str, str]:
    """Return the environment without git's variables.

    A pre-commit hook has GIT_DIR and GIT_INDEX_FILE of this repository. Tests that make repositories of their own would
    commit into this one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
