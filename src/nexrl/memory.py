"""How a process treats memory that it has freed."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD_BYTES = 32 * 2**20
TRIM_THRESHOLD_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Let freed memory serve the next message instead of going back to the kernel, which clears each page anew.

    glibc learns these thresholds from what a process frees, up to the very values set here; until it has, messages of a
    few hundred KiB, and their copies, cost three times as much. Does nothing where there is no glibc.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
