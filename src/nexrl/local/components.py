"""What an experiment needs on one machine: which processes, with which settings."""

import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nexrl.errors import FailedPreconditionError
from nexrl.local.child import Command
from nexrl.local.redis_server import redis_command
from nexrl.local.run_folder import EXPERIMENT_FILE, RunFolder
from nexrl.spec import Experiment

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Addresses:
    """Where the components of a run find each other."""

    redis_url: str
    controller: str
    trajectory_pools: tuple[str, ...]
    weight_sync: str

    @property
    def trajectory_pool(self) -> str:
        """All pool processes, as one gRPC target."""
        return "ipv4:" + ",".join(self.trajectory_pools)

    def endpoints(self) -> Mapping[str, str]:
        """What commands look for in a run that is on."""
        return {
            "controller": self.controller,
            "trajectory_pool": self.trajectory_pool,
            "weight_sync": self.weight_sync,
        }


def choose_addresses(experiment: Experiment, controller_port: int) -> tuple[Addresses, Path | None]:
    """Free ports for what others must find, and the socket of a private Redis unless a URL is given."""
    pools = experiment.spec.trajectory_pool.replicas
    ports = free_ports(pools + 2)
    given = experiment.spec.redis.url
    socket_path = None if given else Path(tempfile.mkdtemp(prefix="nexrl-")) / "redis.sock"
    return Addresses(
        redis_url=given or f"unix://{socket_path}",
        controller=f"{LOOPBACK}:{controller_port or ports[0]}",
        trajectory_pools=tuple(f"{LOOPBACK}:{port}" for port in ports[2:]),
        weight_sync=f"{LOOPBACK}:{ports[1]}",
    ), socket_path


def require_free(port: int) -> None:
    """Raise FailedPreconditionError when somebody listens on `port` (0: any free one will do)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no listeners
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise FailedPreconditionError(
                f"port: cannot listen on {LOOPBACK}:{port}: {error.strerror}; choose another (--port)"
            ) from None


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def commands(
    experiment: Experiment, folder: RunFolder, addresses: Addresses, redis_socket: Path | None
) -> list[Command]:
    """Every process of the run, in the order in which they start."""
    return list(_commands(experiment, folder, addresses, redis_socket))


def _commands(
    experiment: Experiment, folder: RunFolder, addresses: Addresses, redis_socket: Path | None
) -> Iterator[Command]:
    spec = experiment.spec
    if redis_socket is not None:
        yield Command("redis", redis_command(folder.path / "redis", redis_socket), {})
    listens: dict[str, Sequence[str]] = {
        "controller": [addresses.controller],
        "trajectory-pool": addresses.trajectory_pools,
        "weight-sync": [addresses.weight_sync],
        "trainer": [f"{LOOPBACK}:0"],
        "inference": [f"{LOOPBACK}:0"] * spec.inference.replicas,
        "rollout": [f"{LOOPBACK}:0"] * spec.rollout.replicas,
    }
    threads = {"trainer": spec.trainer.threads, "inference": spec.inference.threads}
    for role, addresses_of_role in listens.items():
        for number, listen in enumerate(addresses_of_role):
            name = role if len(addresses_of_role) == 1 and role not in ("inference", "rollout") else f"{role}-{number}"
            settings = {
                "LISTEN": listen,
                "REDIS_URL": addresses.redis_url,
                "REDIS_IS_PRIVATE": str(redis_socket is not None),
                "CONTROLLER": addresses.controller if role != "controller" else "",
                "TRAJECTORY_POOL": addresses.trajectory_pool,
                "WEIGHT_SYNC": addresses.weight_sync,
            }
            yield service_command(role, name, folder.path, settings, threads.get(role, 1))


def service_command(role: str, name: str, run: Path, settings: Mapping[str, str], threads: int = 1) -> Command:
    """One service of the run in folder `run`; `settings` are those of nexrl.settings that a run decides."""
    environment = {
        "NEXRL_EXPERIMENT_FILE": str(run / EXPERIMENT_FILE),
        "NEXRL_RUN_DIR": str(run),
        "NEXRL_INSTANCE": name,
        **{f"NEXRL_{key}": value for key, value in settings.items()},
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return Command(name, [sys.executable, "-m", "nexrl.cli", "serve", role], environment)
