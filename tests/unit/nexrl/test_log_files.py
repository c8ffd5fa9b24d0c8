"""The logs of a run are bounded, and can be read while it runs and after its end."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nexrl import kept_log
from nexrl.errors import NotFoundError
from nexrl.kept_log import newest_bytes, older_log_path, rotate
from nexrl.local.child import Child, Command
from nexrl.local.logs import print_run_logs
from nexrl.local.run_folder import RunFolder
from nexrl.log_files import log_path
from tests.support.patience import eventually
from tests.support.services import small_experiment

CHATTY = """
import logging, os, sys
from pathlib import Path
from nexrl import kept_log
from nexrl.json_logging import configure_logging
kept_log.LOG_BYTES = 2000
configure_logging("sums", "rollout-0", "INFO", Path(sys.argv[1]))
logging.getLogger("worker").info("first")
print("printed by", "user code")
print("begun", end="")
print(" and ended", file=sys.stdout, flush=True)
for number in range(int(sys.argv[2])):
    logging.getLogger("worker").info("line %d", number)
"""


def chat(path: Path, lines: int) -> subprocess.CompletedProcess[str]:
    """Run a process that keeps its log in `path`, prints, and logs so many lines."""
    command = [sys.executable, "-c", CHATTY, str(path), str(lines)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_kept_log_has_what_the_process_logs_and_what_user_code_prints(tmp_path: Path) -> None:
    done = chat(path := log_path(tmp_path, "rollout-0"), 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("worker", "first"),
        ("stdout", "printed by user code"),
        ("stdout", "begun and ended"),
    ]
    assert {line["instance"] for line in lines} == {"rollout-0"}
    assert done.stdout == "printed by user code\nbegun and ended\n"
    assert json.loads(done.stderr)["message"] == "first"


def test_a_kept_log_is_bounded_and_has_the_newest_lines(tmp_path: Path) -> None:
    chat(path := log_path(tmp_path, "rollout-0"), 200)
    assert {each.name for each in path.parent.iterdir()} == {"rollout-0.log", "rollout-0.log.1"}
    assert all(each.stat().st_size <= 2000 for each in path.parent.iterdir())
    assert b"line 199" in newest_bytes(path)


def test_a_link_and_a_pipe_in_the_folder_of_logs_are_neither_written_nor_read(tmp_path: Path) -> None:
    checkpoint, link, pipe = tmp_path / "checkpoint", tmp_path / "trainer.log", tmp_path / "controller.log"
    checkpoint.write_text("weights")
    link.symlink_to(checkpoint)
    os.mkfifo(pipe)
    for path in (link, pipe):
        assert newest_bytes(path) == b""
        with pytest.raises(OSError, match=path.name):
            kept_log.KeptLog(path)
    assert checkpoint.read_text() == "weights"


def test_a_process_whose_log_cannot_be_kept_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a folder")
    done = chat(log_path(tmp_path, "rollout-0"), 1)
    assert "the log is not kept: " in done.stderr
    assert "line 0" in done.stderr
    full = chat(Path("/dev/full"), 1)  # like a volume without space
    assert "line 0" in full.stderr
    assert "Traceback" not in full.stderr


async def test_the_log_of_a_child_is_rotated_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_log, "LOG_BYTES", 1000)
    script = "import sys\nfor n in (1, 2): print(*range(400), n, flush=True); sys.stdin.readline()"
    child = Child(Command("rollout-0", [sys.executable, "-u", "-c", script], {}), tmp_path)
    assert await child.run() == 0
    rotate(child.log)
    assert child.log.stat().st_size == 0
    assert older_log_path(child.log).stat().st_size == 1000
    assert child.last_words().endswith("399 2")
    assert await child.run() == 0  # it appends to the same file
    assert child.log.read_text().startswith("0 1 2 3")
    rotate(tmp_path / "absent.log")


async def test_logs_of_a_component_are_printed_after_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path, small_experiment())
    folder.close()
    for name in ("rollout-0", "rollout-1", "trainer"):
        log_path(folder.path, name).write_text(f"line of {name}\n")
    older_log_path(log_path(folder.path, "trainer")).write_text("older\n")
    await print_run_logs(folder.path, "trainer", follows=True)
    assert capsys.readouterr().out == "older\nline of trainer\n"
    await print_run_logs(folder.path, "rollout", follows=False)
    assert capsys.readouterr().out == "rollout-0 line of rollout-0\nrollout-1 line of rollout-1\n"
    await print_run_logs(folder.path, "rollout-1", follows=False)
    assert capsys.readouterr().out == "line of rollout-1\n"
    with pytest.raises(NotFoundError, match="no logs of 'engine'; there are logs of: rollout-0, rollout-1, trainer"):
        await print_run_logs(folder.path, "engine", follows=False)


async def test_logs_of_a_running_run_are_followed_to_its_end_across_a_rotation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl.local.logs.FOLLOW_SECONDS", 0.01)
    folder = RunFolder(tmp_path, small_experiment())
    path = log_path(folder.path, "trainer")
    path.write_text("first\nsecond, not")
    following = asyncio.create_task(print_run_logs(folder.path, "trainer", follows=True))
    said = ""

    async def until(text: str) -> None:
        def is_said() -> bool:
            nonlocal said
            said += capsys.readouterr().out
            return said.endswith(text)

        await eventually(is_said, f"the log says {text!r}")

    await until("first\n")
    with path.open("a") as log:
        log.write(" finished\n")
    await until("second, not finished\n")
    os.truncate(path, 0)
    with path.open("a") as log:
        log.write("third\n")
    await until("third\n")
    folder.close()
    await following
    assert said + capsys.readouterr().out == "first\nsecond, not finished\nthird\n"
