"""Processes that cannot outlive their parent, however that ends.

`python bound.py PARENT_PID COMMAND…` runs such a command: the setting (prctl(2), PR_SET_PDEATHSIG) survives exec. Needs
nothing but the standard library, so that it starts fast.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def bind(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends; end it now if that has happened."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(f"process {parent}, which started this one, has ended")


def main(parent: int, command: list[str]) -> None:
    """Bind to `parent`, then become `command`."""
    bind(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
