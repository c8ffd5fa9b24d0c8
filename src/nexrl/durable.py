"""What is written here survives a power cut."""

import os
from pathlib import Path


def force_to_disk(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to disk (fsync(2)). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
