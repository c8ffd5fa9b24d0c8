"""Reads the how-to pages. A code block with a title is a file."""

import re
from pathlib import Path

HOW_TO = Path(__file__).parents[2] / "docs/how-to"
BLOCK = re.compile(r'^```(?P<language>\w+)(?: title="(?P<file>[\w./-]+)")?\n(?P<text>.*?)^```$', re.M | re.S)


def write_files(page: str, folder: Path) -> None:
    """Write the files of a page to `folder`."""
    for match in BLOCK.finditer(page):
        if match["file"]:
            (folder / match["file"]).write_text(match["text"])
