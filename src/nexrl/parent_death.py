"""Ends a process when its parent ends, however the parent ends (prctl(2), PR_SET_PDEATHSIG).

`python parent_death.py PARENT_PID COMMAND…` runs COMMAND that way: the setting survives exec. This file imports
only the standard library, so that it starts fast.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends. Exit now if `parent` has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # the parent ended before the call: the kernel will send no signal
        sys.exit(f"the parent process {parent} has ended")


def main(parent: int, command: list[str]) -> None:
    """Call `die_with_parent`, then replace this process by `command`."""
    die_with_parent(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
