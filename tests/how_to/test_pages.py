"""The how-to pages do what they say, out of tree, with NexRL installed from its wheel.

A page's blocks with a title are files; its console blocks are commands. A command must exit with 0, and each line that
the page shows below it must be in its output. `make test-how-to` installs the wheel and runs this.
"""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.pages import BLOCK, HOW_TO, write_files
from tests.support.patience import LIMIT_SECONDS

PAGES = sorted(HOW_TO.glob("write-*.md"))
ENVIRONMENT = "WHEEL_ENVIRONMENT"

pytestmark = [
    pytest.mark.wheel,
    pytest.mark.skipif(ENVIRONMENT not in os.environ, reason="needs NexRL installed from its wheel: make test-how-to"),
]


@dataclass(frozen=True)
class Command:
    """A command of a page, and the lines that the page shows as its output; `...` stands for what is left out."""

    line: str
    shown: tuple[str, ...]


def commands(page: str) -> list[Command]:
    found = []
    for match in BLOCK.finditer(page):
        if match["language"] == "console":
            for part in re.split(r"^\$ ", match["text"], flags=re.M)[1:]:
                line, *shown = part.splitlines()
                found.append(Command(line, tuple(text for text in shown if text.strip(". "))))
    return found


def run(command: Command, folder: Path) -> str:
    binaries = Path(os.environ[ENVIRONMENT]).resolve() / "bin"
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": ""}
    done = subprocess.run(
        shlex.split(command.line),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{command.line}: exit code {done.returncode}\n{output}"
    return output


def words(text: str) -> str:
    """The text with each run of white space as one space, and without the frames of tables."""
    return " ".join(re.sub(r"[│┃┏┓┗┛┡┩┳┻━─└┘┴╇]", " ", text).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    write_files(text, tmp_path)
    assert commands(text), f"{page.name} has no command"
    for command in commands(text):
        output = words(run(command, tmp_path))
        for line in command.shown:
            assert words(line) in output, f"{command.line}: {line!r} is not in its output\n{output}"
