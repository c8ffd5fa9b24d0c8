"""A redis-server that can be made to lose its last writes, as one may that is killed or fails over to a replica."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.redis_servers import Program, Server, find_program, folder


class ForgetfulRedis:
    """The server; see `forgetful_redis`."""

    def __init__(self, program: Program, files: Path) -> None:
        # Each write is on disk before it is answered, so that `remember` misses none.
        self._server = Server(program, files, "--appendonly", "yes", "--appendfsync", "always")
        self._kept = files.with_name("kept")
        self.url = self._server.url
        self._server.start()

    def remember(self) -> None:
        """What `forget` goes back to: all that was written until now."""
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._server.folder, self._kept, ignore=shutil.ignore_patterns("*.sock"))

    def forget(self) -> None:
        """SIGKILL, and a start without what was written since `remember`; with nothing when that was never called."""
        self.kill()
        shutil.rmtree(self._server.folder)
        if self._kept.exists():
            shutil.copytree(self._kept, self._server.folder)
        self._server.start()

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._server.end()


@contextmanager
def forgetful_redis() -> Iterator[ForgetfulRedis]:
    """A fresh server that ends with the block."""
    program = find_program("redis-6.2")
    assert program is not None
    with folder() as path:
        server = ForgetfulRedis(program, path / "files")
        try:
            yield server
        finally:
            server.kill()
