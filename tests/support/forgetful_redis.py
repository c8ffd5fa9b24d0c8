"""A redis-server that a test can make lose its last writes. A real server may lose them at a kill or a failover."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.redis_servers import Program, Server, find_program, folder


class ForgetfulRedis:
    """The server; see `forgetful_redis`."""

    def __init__(self, program: Program, files: Path) -> None:
        # Redis writes to disk before it answers, so that `remember` copies every acknowledged write.
        self._server = Server(program, files, "--appendonly", "yes", "--appendfsync", "always")
        self._kept = files.with_name("kept")
        self.url = self._server.url
        self._server.start()

    def remember(self) -> None:
        """Copy the server's files. `forget` returns to this state."""
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._server.folder, self._kept, ignore=shutil.ignore_patterns("*.sock"))

    def forget(self) -> None:
        """Kill the server, and restart it in the state of the last `remember`; empty if `remember` was never called."""
        self.kill()
        shutil.rmtree(self._server.folder)
        if self._kept.exists():
            shutil.copytree(self._kept, self._server.folder)
        self._server.start()

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until it has ended."""
        self._server.end()


@contextmanager
def forgetful_redis() -> Iterator[ForgetfulRedis]:
    """Run an empty server until the block ends."""
    program = find_program("redis-6.2")
    assert program is not None
    with folder() as path:
        server = ForgetfulRedis(program, path / "files")
        try:
            yield server
        finally:
            server.kill()
