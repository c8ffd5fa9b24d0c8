"""Sizes of memory: as text, as Kubernetes writes them, and what this machine has."""

import re
import shutil
import subprocess
from pathlib import Path

from nexrl.errors import FailedPreconditionError, InvalidArgumentError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")
_QUERY_SECONDS = 20.0


def parse_bytes(field: str, text: str) -> int:
    """Return the bytes of a quantity as `80Gi`. Raises InvalidArgumentError that names `field`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMGT]|[KMGT]i)?", text)
    if not found:
        raise InvalidArgumentError(f"{field}: {text!r}; use a number with a unit, as 80Gi or 512Mi")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def format_bytes(count: int) -> str:
    """Return the size in GiB, or in MiB below 1 GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def host_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Return the memory that processes here may use: of the machine, or less if their cgroup has a limit.

    Raises FailedPreconditionError where the machine does not say.
    """
    text = meminfo.read_text() if meminfo.is_file() else ""
    found = re.search(r"^MemTotal: +(\d+) kB$", text, re.MULTILINE)
    if not found:
        raise FailedPreconditionError(f"{meminfo} does not say how much memory there is; give --memory")
    machine = int(found[1]) * 1024
    limit = cgroup.read_text().strip() if cgroup.is_file() else "max"
    return machine if limit == "max" else min(machine, int(limit))


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU here, None without a GPU. Asks nvidia-smi, so torch is not needed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_QUERY_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if sizes else None
