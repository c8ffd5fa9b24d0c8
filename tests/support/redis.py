"""Runs a real redis-server for tests."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from nexrl.local.redis_server import redis_command
from tests.support.patience import eventually_blocking


@contextmanager
def running_redis(files: Path | None = None) -> Iterator[str]:
    """Run a server until the block ends, and yield its URL. It starts empty, or with a copy of `files`."""
    with tempfile.TemporaryDirectory(prefix="nexrl-redis-") as folder:
        if files is not None:
            shutil.copytree(files, folder, dirs_exist_ok=True)
        socket = Path(folder) / "redis.sock"
        command = redis_command(Path(folder), socket)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as server:
            try:
                _wait_until_up(f"unix://{socket}", server)
                yield f"unix://{socket}"
            finally:
                server.kill()


def _wait_until_up(url: str, server: "subprocess.Popen[bytes]") -> None:
    def answers() -> bool:
        assert server.poll() is None, "redis-server ended"
        return bool(redis.Redis.from_url(url).ping())

    eventually_blocking(answers, f"redis-server answers at {url}", tolerated=(redis.exceptions.ConnectionError,))
