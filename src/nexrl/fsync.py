"""Forces files and folders to disk, so that they survive a power cut."""

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Force the content of a file, or the entries of a folder, to disk (fsync(2)). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
