"""How `nexrl serve` starts a service, and what a command says that lacks a package."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nexrl import cli
from nexrl.errors import FailedPreconditionError
from tests.support.patience import LIMIT_SECONDS


def test_a_name_that_is_a_run_on_this_machine_too_is_looked_for_on_the_cluster_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    command = [sys.executable, "-m", "nexrl.cli", "status", "mine"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stderr
    assert "mine is looked for on the cluster; the run on this machine is runs/mine" in said
    assert "error: no cluster: " in said


class EntryPoint:
    """A service that records whether the garbage collector runs while it is imported, and while it serves."""

    name = "recording"

    def __init__(self) -> None:
        self.is_collected: list[bool] = []
        self.frozen = 0

    def load(self) -> Callable[[], None]:
        self.is_collected.append(gc.isenabled())
        return self.main

    def main(self) -> None:
        self.is_collected.append(gc.isenabled())
        self.frozen = gc.get_freeze_count()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPoint]:
    point = EntryPoint()
    monkeypatch.setattr(cli, "entry_points", lambda group: [point])
    yield point
    gc.unfreeze()
    gc.enable()


def test_a_service_is_imported_without_garbage_collection_and_served_with_it(service: EntryPoint) -> None:
    cli.serve(service.name)
    assert service.is_collected == [False, True]
    assert service.frozen > 0


@pytest.mark.parametrize("command", ["status", "audit", "traj list", "run"])
def test_a_command_without_its_packages_says_what_to_install(tmp_path: Path, command: str) -> None:
    (tmp_path / "experiment.yaml").touch()
    code = "import sys; sys.modules.update(redis=None, pydantic_settings=None); from nexrl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split(), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == FailedPreconditionError.exit_code
    assert " is not installed; this command needs the extra local" in done.stderr
    assert "Traceback" not in done.stderr
