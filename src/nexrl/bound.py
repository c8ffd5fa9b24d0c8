"""Run a command that cannot outlive its parent: `python bound.py PARENT_PID COMMAND…`.

The kernel kills this process when the parent ends, however it ends (prctl(2), PR_SET_PDEATHSIG), and the setting
survives exec. Needs nothing but the standard library, so that it starts fast.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Bind to `parent`, then become `command`."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit("the launcher has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
