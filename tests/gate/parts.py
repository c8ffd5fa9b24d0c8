"""The parts of the gate: which command each runs, on which lane, and what it needs.

Lane 1 keeps both cores busy, at its end as well. The longest parts of lane 2 wait more than they compute:
for an API server, and for pods.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CLUSTER = ("KUBECONFIG", "program:kubectl", "program:helm")
VLLM_PYTHON = ".venv-vllm/bin/python"


@dataclass(frozen=True)
class Part:
    """One command, or one run of pytest. The parts of a lane run one after the other."""

    name: str
    limit_seconds: float
    """Ends a part that hangs. No part comes near it, also beside other work."""
    command: Sequence[str] = ()
    tests: Sequence[str] = ()
    """Folders or node ids, of a part that is a run of pytest."""
    workers: int = 0
    """Processes of that run. 0: its own."""
    python: str = sys.executable
    lane: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    after: Sequence[str] = ()
    """Parts, of any lane, that must have ended before, and not failed."""
    needs: Sequence[str] = ()
    """Environment variables, and programs as `program:NAME`, without which the part is skipped."""
    is_first: bool = False
    """All such parts run before the others. If one fails, no other part runs."""
    is_timed: bool = False
    """Its tests wait for processes: one that fails runs once more, alone."""

    def arguments(self, report: Path) -> list[str]:
        """Return the whole command. Pytest writes its `report` as XML."""
        if not self.tests:
            return [*self.command]
        spread = ["-n", str(self.workers), "--dist", "loadgroup"] if self.workers else []
        written = [f"--junitxml={report}", "--override-ini=junit_family=xunit1", "--durations=12"]
        return [self.python, "-m", "pytest", "-m", "not soak", *spread, *written, *self.tests]

    @property
    def missing(self) -> str:
        """The reason to skip the part; "" if there is none."""
        for need in self.needs:
            program = need.removeprefix("program:")
            if program != need and not shutil.which(program):
                return f"{program} is not on the PATH"
            if program == need and not os.environ.get(need):
                return f"{need} is not set"
        return ""


CHAOS = {"KILLS": "8", "SEED": "3867"}
"""Each kind of process once, two of them at the same time, and Redis loses its last second."""

PARTS = (
    Part("form", 300, ("make", "gate-form"), is_first=True),
    Part("types", 600, ("make", "gate-types"), lane=2, is_first=True),
    Part("set-up of examples", 900, ("make", "setup-examples"), needs=["program:cc"]),
    Part("set-up of Redis", 900, ("make", "redis-servers")),
    Part("unit", 1500, tests=["tests/unit"], workers=2),
    Part("integration", 1800, tests=["tests/integration"], workers=3, is_timed=True),
    Part("vllm", 1500, tests=["tests/vllm"], python=VLLM_PYTHON, after=["set-up of vllm"], is_timed=True),
    Part("chaos", 900, tests=["tests/chaos"], environment=CHAOS, is_timed=True),
    Part("runs", 2400, tests=["tests/e2e"], workers=2, is_timed=True),
    Part("set-up of vllm", 1500, ("make", "setup-vllm"), lane=2),
    Part(
        "quickstart",
        600,
        (".ci/without-compiler", "make", "quickstart", "STEPS=5"),
        lane=2,
        after=["set-up of examples"],
    ),
    Part("envtest", 1800, tests=["tests/envtest"], lane=2, is_timed=True),
    Part("scan", 600, ("make", "scan"), lane=2, needs=["program:helm"]),
    Part("mutants", 900, (sys.executable, "-m", "tests.mutations", "--gate"), lane=2),
    Part("stress", 1200, (sys.executable, "-m", "tests.gate.stress", "--added"), lane=2),
    Part("images", 1800, ("make", "images"), lane=2, needs=CLUSTER),
    Part("cluster", 2400, tests=["tests/kubernetes"], lane=2, after=["images"], needs=CLUSTER, is_timed=True),
)
"""In the order of each lane, and of the table. What no part runs is in `make soak` or `make test-gpu`."""
