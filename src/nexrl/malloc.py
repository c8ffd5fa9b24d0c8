"""Sets when glibc's malloc returns freed memory to the kernel (mallopt(3))."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD_BYTES = 32 * 2**20
TRIM_THRESHOLD_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Keep freed memory for the next message. Does nothing without glibc.

    Memory that was returned to the kernel is cleared page by page when it is allocated again. glibc raises both
    thresholds by itself, up to these values, as a process frees large blocks. Until then, handling a message of a few
    hundred KiB takes three times as long.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
