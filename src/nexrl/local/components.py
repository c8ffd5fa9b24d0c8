"""The components of an experiment as processes of one machine: addresses and command lines."""

import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from nexrl.components import BY_NAME, COMPONENTS, Wiring
from nexrl.errors import FailedPreconditionError
from nexrl.gpus import usable_gpus
from nexrl.local.child import Command
from nexrl.local.gpu_assignment import assign_gpus
from nexrl.local.redis_server import redis_command
from nexrl.local.run_folder import RunFolder
from nexrl.run_layout import REDIS_FOLDER
from nexrl.settings import REDIS_PASSWORD, redis_password
from nexrl.spec import Experiment
from nexrl.spec.rollout import ExternalRollout

LOOPBACK = "127.0.0.1"
PORTS = range(10_000, 32_768)
"""Below those of outgoing connections: one of these could be taken while a process restarts."""


@dataclass(frozen=True)
class Addresses:
    """Addresses of the components of a run."""

    redis_url: str
    controller: str
    data_reader: str
    trajectory_pools: tuple[str, ...]
    weight_sync: str
    trainer_replicas: tuple[str, ...] = ()
    """Of all replicas but replica 0, which calls them."""
    rollouts: tuple[str, ...] = ()
    """Of gateways that agents of other processes call: gRPC."""
    gateways: tuple[str, ...] = ()
    """Of the same gateways: HTTP."""

    @property
    def trajectory_pool(self) -> str:
        """All pool processes, as one gRPC target."""
        return "ipv4:" + ",".join(self.trajectory_pools)

    def endpoints(self) -> Mapping[str, str]:
        """Return the addresses that commands such as `nexrl status` look up while the run is running."""
        return {
            "controller": self.controller,
            "trajectory_pool": self.trajectory_pool,
            "weight_sync": self.weight_sync,
            **({"gateway": "ipv4:" + ",".join(self.rollouts)} if self.rollouts else {}),
            **({"gateway_http": ",".join(f"http://{address}" for address in self.gateways)} if self.gateways else {}),
        }


def choose_addresses(experiment: Experiment, controller_port: int) -> tuple[Addresses, Path | None]:
    """Choose free ports for components that others call, and a socket for a private Redis unless a URL is given."""
    pools, others = experiment.spec.trajectory_pool.replicas, experiment.spec.trainer.replicas - 1
    gateways = experiment.spec.rollout.replicas if isinstance(experiment.spec.rollout, ExternalRollout) else 0
    ports = free_ports(3 + pools + others + 2 * gateways)
    spare = ports[3 + pools + others :]
    given = experiment.spec.redis.url
    socket_path = None if given else Path(tempfile.mkdtemp(prefix="nexrl-")) / "redis.sock"
    return Addresses(
        redis_url=given or f"unix://{socket_path}",
        controller=f"{LOOPBACK}:{controller_port or ports[0]}",
        data_reader=f"{LOOPBACK}:{ports[2]}",
        trajectory_pools=tuple(f"{LOOPBACK}:{port}" for port in ports[3 : 3 + pools]),
        weight_sync=f"{LOOPBACK}:{ports[1]}",
        trainer_replicas=tuple(f"{LOOPBACK}:{port}" for port in ports[3 + pools : 3 + pools + others]),
        rollouts=tuple(f"{LOOPBACK}:{port}" for port in spare[:gateways]),
        gateways=tuple(f"{LOOPBACK}:{port}" for port in spare[gateways:]),
    ), socket_path


def require_free(port: int) -> None:
    """Raise FailedPreconditionError if another process listens on `port`; 0 always passes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore closed connections in TIME_WAIT
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise FailedPreconditionError(
                f"port: cannot listen on {LOOPBACK}:{port}: {error.strerror}; choose another (--port)"
            ) from None


def free_ports(number: int) -> list[int]:
    """Ports on which no process listens at this moment; raises FailedPreconditionError if there are not so many."""
    free: list[int] = []
    for port in SystemRandom().sample(PORTS, len(PORTS)):
        if len(free) == number:
            break
        with socket.socket() as each, suppress(OSError):
            each.bind((LOOPBACK, port))
            free.append(port)
    if len(free) < number:
        raise FailedPreconditionError(
            f"ports: fewer than {number} of {PORTS[0]} to {PORTS[-1]} are free; end other runs"
        )
    return free


def commands(
    experiment: Experiment, folder: RunFolder, addresses: Addresses, redis_socket: Path | None
) -> list[Command]:
    """Return the command of every process of the run, in the order in which they start."""
    return list(_commands(experiment, folder, addresses, redis_socket))


def _commands(
    experiment: Experiment, folder: RunFolder, addresses: Addresses, redis_socket: Path | None
) -> Iterator[Command]:
    if redis_socket is not None:
        yield Command("redis", redis_command(folder.path / REDIS_FOLDER, redis_socket), {})
    wiring = Wiring(
        experiment_file=folder.experiment_file,
        run_folder=folder.path,
        controller=addresses.controller,
        data_reader=addresses.data_reader,
        trajectory_pool=addresses.trajectory_pool,
        weight_sync=addresses.weight_sync,
        trainer_replicas=",".join(addresses.trainer_replicas),
        redis_url=addresses.redis_url,
        redis_is_managed=redis_socket is not None,
    )
    fixed = {
        "controller": [addresses.controller],
        "data-reader": [addresses.data_reader],
        "trajectory-pool": list(addresses.trajectory_pools),
        "weight-sync": [addresses.weight_sync],
        "trainer": [f"{LOOPBACK}:0", *addresses.trainer_replicas],
        **({"rollout": list(addresses.rollouts)} if addresses.rollouts else {}),
    }
    gpus = assign_gpus(experiment.spec, usable_gpus())
    for component in COMPONENTS:
        listens = fixed.get(component.name, [f"{LOOPBACK}:0"] * component.replicas(experiment.spec))
        is_numbered = component.is_numbered or len(listens) > 1
        for number, listen in enumerate(listens):
            name = f"{component.name}-{number}" if is_numbered else component.name
            own = {"NEXRL_REPLICA": str(number)} if component.name == "trainer" else {}
            if component.name == "rollout" and addresses.gateways:
                own = {"NEXRL_HTTP_PORT": addresses.gateways[number].rpartition(":")[2]}
            own |= gpus.get((component.name, number), {})
            yield service_command(component.name, name, experiment, wiring, {"NEXRL_LISTEN": listen, **own})


def service_command(
    role: str, instance: str, experiment: Experiment, wiring: Wiring, variables: Mapping[str, str]
) -> Command:
    """Return the command of one service; `variables` are those that only this process has."""
    if BY_NAME[role].uses_redis:
        variables = {**variables, REDIS_PASSWORD: redis_password()}
    environment = {**wiring.environment(BY_NAME[role], experiment.spec), "NEXRL_INSTANCE": instance, **variables}
    return Command(instance, [sys.executable, "-m", "nexrl.cli", "serve", role], environment)
