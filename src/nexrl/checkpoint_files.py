"""The files of a checkpoint, without torch: its marker, and whether they are what it says."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from nexrl.errors import FailedPreconditionError, NotFoundError
from nexrl.run_layout import CHECKPOINT_MARKER

FORMAT = 1
"""Version of the marker's content."""


def check_files(path: Path) -> None:
    """Raise FailedPreconditionError if a file of the checkpoint is missing or damaged."""
    for name, digest in read_marker(path)["sha256"].items():
        if not (path / name).is_file() or sha256(path / name) != digest:
            raise FailedPreconditionError(f"checkpoint {path}: {name} is missing or damaged")


def read_marker(path: Path) -> dict[str, Any]:
    """Return the content of the marker. Raises NotFoundError if `path` is not a complete checkpoint."""
    try:
        content: dict[str, Any] = json.loads((path / CHECKPOINT_MARKER).read_text())
    except (OSError, ValueError) as error:  # ValueError: no JSON, or a path with a character that is not allowed
        raise NotFoundError(f"{path} is not a complete checkpoint: {CHECKPOINT_MARKER}: {error}") from None
    if not isinstance(content, dict) or not {"format", "metadata", "sha256"} <= content.keys():
        raise NotFoundError(f"{path} is not a complete checkpoint: {CHECKPOINT_MARKER} is no marker of NexRL")
    if content["format"] != FORMAT:
        raise FailedPreconditionError(f"checkpoint {path} has format {content['format']}; this version reads {FORMAT}")
    return content


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_files(path: Path, name: str) -> list[Path]:
    """Return the safetensors files of this name in the checkpoint at `path`, one for each rank that wrote it."""
    files = read_marker(path)["sha256"]
    return [path / file for file in files if re.fullmatch(rf"{name}(-\d+-of-\d+)?\.safetensors", file)]
