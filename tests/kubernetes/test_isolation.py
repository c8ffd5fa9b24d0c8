"""Experiments of three owners, in one namespace and in two: what code in each pod reaches, and what it is answered.

tests/integration/test_owners.py has the case that no two releases make: two namespaces with one authority.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from secrets import token_hex

import pytest

from nexrl.k8s.volume import CONTAINER, reader_pod
from nexrl.store import key_prefix
from nexrl.tls import experiment_name
from nexrl_operator.objects import DATA_READER_PORT, RUN_FOLDER
from tests.kubernetes.conftest import RELEASE
from tests.support import foreign_calls, foreign_commands
from tests.support.cluster import RESTRICTED, WAIT, Namespace, Object, eventually, fresh_namespace
from tests.support.experiments import FOREVER, Running, applied, slow
from tests.support.python_pods import python_pod
from tests.support.reach import Place, Question, measured, opened, places_of, promised, with_probe

OPERATOR, REDIS = ("app.kubernetes.io/component=" + name for name in ("operator", "redis"))
OPEN_PORTS, OTHER_PORTS = (53, 443, 6443), (80, 6379, 50051)
LISTEN = """
import asyncio, sys

async def main():
    servers = [await asyncio.start_server(lambda *_: None, "0.0.0.0", int(port)) for port in sys.argv[1:]]
    await asyncio.Event().wait()

asyncio.run(main())
"""
ALLOW_ALL = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "allow-all"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]},
}
"""Policies add up: beside this one, the others of a namespace forbid nothing."""
OF_ONE_AUTHORITY = {
    "certificate": {"grpc": "PERMISSION_DENIED", "grpc-token": "UNAUTHENTICATED", "http": "403"},
    "token": {"grpc": "UNAVAILABLE", "grpc-token": "PERMISSION_DENIED", "http": "403"},
    "nothing": {"grpc": "UNAVAILABLE", "grpc-token": "UNAUTHENTICATED", "http": "401"},
}
"""What an owner is answered by another one's pods: by what it shows, and by the name of the port."""
OF_TWO_AUTHORITIES = OF_ONE_AUTHORITY | {
    "certificate": {"grpc": "UNAVAILABLE", "grpc-token": "UNAUTHENTICATED", "http": "no connection"}
}
OF_EVERYBODY = {"health": "UNIMPLEMENTED", "metrics": "200"}
"""These ports show nothing else, and ask nobody who it is: docs/how-to/tls.md."""

NOT_SERVED = ("DataReaderService", "GatewayService", "TrainerReplicaService")
"""By these experiments: on loopback only; of agents elsewhere; of trainers of several replicas."""


@dataclass(frozen=True)
class Owners:
    """Experiments of three owners."""

    ours: Running
    beside: Running
    """In the same namespace."""
    elsewhere: Running
    """In another namespace, with the name of ours, and of another release."""

    def for_each_pair(self, require: Callable[[Running, Running], None]) -> None:
        """Call `require` for ours and each other experiment, in both directions. They run together."""
        others = (self.beside, self.elsewhere)
        with ThreadPoolExecutor() as pool:
            callers, called = [*others, self.ours, self.ours], [self.ours, self.ours, *others]
            list(pool.map(require, callers, called))


@pytest.fixture(scope="module")
def owners(namespace: Namespace, running: Running) -> Iterator[Owners]:
    with ExitStack() as stack:
        other = stack.enter_context(fresh_namespace(RESTRICTED))
        other.install(RELEASE, "crds.enabled=false")
        stack.callback(other.uninstall, RELEASE)
        # Without its operator, an experiment that is being deleted would stay.
        stack.callback(eventually, lambda: not other.list("experiments"), "no experiment is left")
        ours, elsewhere = (stack.enter_context(applied(each, ours_with_probe())) for each in (namespace, other))
        for each in (ours, elsewhere):
            each.until_step(1)
        yield Owners(ours, running, elsewhere)


def test_code_in_each_kind_of_pod_reaches_what_the_security_page_says(owners: Owners) -> None:
    release = owners.ours.namespace
    with outside(owners.elsewhere.namespace) as address, results_reader(owners.ours) as reader:
        places = places_of(owners.ours) | {
            "operator": Place(release, release.pods(OPERATOR)[0]["metadata"]["name"], "operator"),
            "redis": Place(release, f"{RELEASE}-redis-0", "redis"),
            "results reader": reader,
        }
        assert measured(Question(addresses(owners, address), contents(owners)), places) == promised()


def test_network_policies_let_no_owner_connect_to_another(owners: Owners) -> None:
    def require_closed(caller: Running, called: Running) -> None:
        place, closed = places_of(caller)["weight-sync"], [*called.namespace.addresses(called.selector)]
        if caller.namespace is not called.namespace:
            closed += called.namespace.addresses(REDIS)
        eventually(lambda: not opened(place, closed), f"{called.name} is closed to {place}")

    owners.for_each_pair(require_closed)


def test_user_of_one_experiment_in_redis_reaches_nothing_of_another(owners: Owners) -> None:
    for caller, called in ((owners.ours, owners.beside), (owners.beside, owners.ours)):
        own, other = (each.namespace.secret(f"{each.name}-redis")["username"].decode() for each in (caller, called))
        allowed = f"HGETALL {key_prefix(own, 'default')}meta"
        asked = [allowed, *foreign_commands.refused(own, other, "default")]
        place = places_of(caller)["weight-sync"]
        assert place.ask(foreign_commands, {"url": "", "commands": asked}) == [allowed]


def test_without_network_policies_each_service_of_an_owner_refuses_the_others(owners: Owners) -> None:
    def require_refusals(caller: Running, called: Running) -> None:
        place, ports = places_of(caller)["weight-sync"], called.namespace.addresses(called.selector)
        eventually(lambda: {*opened(place, ports)} == {*ports}, "all ports are open")
        found = answers(place, caller, called, ports)
        verdict = {shown: verdicts(by_port) for shown, by_port in found.items()}
        if caller.namespace is called.namespace:
            assert verdict == {shown: by_port | OF_EVERYBODY for shown, by_port in OF_ONE_AUTHORITY.items()}
            not_served = {path for service in NOT_SERVED for path in foreign_calls.methods()[service]}
            assert unanswered(found["certificate"]["grpc"]) == not_served
        else:
            assert verdict == {shown: by_port | OF_EVERYBODY for shown, by_port in OF_TWO_AUTHORITIES.items()}
            assert "invalid username-password pair" in refusal_of_redis(place, caller, called)

    with everything_allowed(owners.ours.namespace, owners.elsewhere.namespace):
        owners.for_each_pair(require_refusals)
    for each in (owners.ours, owners.beside, owners.elsewhere):
        each.count()


def ours_with_probe() -> Object:
    """Return an experiment that requests little CPU time, because three of them must fit onto a node with two cores."""
    little = {"spec": {"containers": [{"name": "nexrl", "resources": {"requests": {"cpu": "50m"}}}]}}
    templates = {f"{section}__template": little for section in ("trainer", "inference", "rollout", "trajectoryPool")}
    return with_probe(slow("ours", trainer__steps=FOREVER, **templates))


def addresses(owners: Owners, outside: str) -> dict[str, list[str]]:
    """Return what the probe tries to connect to."""
    release, another = owners.ours.namespace, owners.elsewhere.namespace
    return {
        **_by_port(owners.ours, "the pods of its experiment"),
        **_by_port(owners.beside, "another experiment in its namespace"),
        "Redis, the operator and experiments of another release, in another namespace": [
            *another.addresses("app.kubernetes.io/part-of=nexrl")
        ],
        "Redis": [*release.addresses(REDIS)],
        "the metrics of the operator": [*release.addresses(OPERATOR)],
        "ports 53, 443 and 6443 of any address: DNS, HTTPS, the API server": [
            f"{outside}:{port}" for port in OPEN_PORTS
        ],
        "other ports of any address, such as 80, where clouds serve metadata": [
            f"{outside}:{port}" for port in OTHER_PORTS
        ],
        "the data reader, on the loopback interface": [f"127.0.0.1:{DATA_READER_PORT}"],
    }


def contents(owners: Owners) -> dict[str, list[bytes]]:
    """Return what the probe looks for in environments and files."""
    release, on_volume = owners.ours.namespace, token_hex().encode()
    trainer = places_of(owners.ours)["trainer"]
    release.kubectl("exec", trainer.pod, "--", "sh", "-c", f"echo {on_volume.decode()} > {RUN_FOLDER}/mark")
    return {
        "reads the volume of the run: checkpoints, logs": [on_volume],
        "the password of its experiment in Redis": [release.secret("ours-redis")["password"]],
        "the key of its experiment's certificate": [release.secret("ours-tls")["tls.key"]],
        "a password or key of another experiment": [
            content
            for other in (owners.beside, owners.elsewhere)
            for suffix, key in (("redis", "password"), ("tls", "tls.key"))
            for content in [other.namespace.secret(f"{other.name}-{suffix}")[key]]
        ],
        "the password of the release in Redis": [release.secret(f"{RELEASE}-redis")["password"]],
        "the key of Redis' certificate": [release.secret(f"{RELEASE}-redis-tls")["tls.key"]],
        "the key of the authority": [release.secret(f"{RELEASE}-ca")["tls.key"]],
    }


def _by_port(running: Running, whose: str) -> dict[str, list[str]]:
    found = running.namespace.addresses(running.selector)
    return {
        f"port 50051 (gRPC) of {whose}": [address for address, name in found.items() if name == "grpc"],
        f"other ports of {whose}": [address for address, name in found.items() if name != "grpc"],
    }


def answers(
    place: Place, caller: Running, called: Running, ports: Mapping[str, str]
) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return what is answered: by what the caller shows, port and RPC."""
    own = caller.namespace.secret(f"{caller.name}-tls")
    ca = called.namespace.secret(f"{called.name}-tls")["ca.crt"].decode()
    certificate = {"certificate": own["tls.crt"].decode(), "key": own["tls.key"].decode()}
    callers = {"certificate": certificate, "token": {"token": token(caller, called)}, "nothing": {}}
    asked = {
        "name": experiment_name(called.namespace.name, called.name),
        "addresses": ports,
        "callers": {shown: {"ca": ca, **content} for shown, content in callers.items()},
    }
    found: dict[str, dict[str, dict[str, list[str]]]] = place.ask(foreign_calls, asked)
    return found


def refusal_of_redis(place: Place, caller: Running, called: Running) -> str:
    """Return why the Redis of another release does not let the caller in, who does not check the server's name."""
    (address,) = called.namespace.addresses(REDIS)
    user = caller.namespace.secret(f"{caller.name}-redis")["username"].decode()
    url = f"rediss://{user}@{address}?ssl_cert_reqs=none"
    return str(place.ask(foreign_commands, {"url": url, "commands": ["PING"]}))


def verdicts(by_port: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, str]:
    """Return the statuses of each port, without UNIMPLEMENTED where a server has some of the services."""
    found = {port: {each for statuses in by_rpc.values() for each in statuses} for port, by_rpc in by_port.items()}
    return {port: ", ".join(sorted(each - {"UNIMPLEMENTED"} or each)) for port, each in found.items()}


def unanswered(by_rpc: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the RPCs that no server has."""
    return {rpc for rpc, statuses in by_rpc.items() if [*statuses] == ["UNIMPLEMENTED"]}


def token(caller: Running, called: Running) -> str:
    """Return a token that a pod of the caller can have: in its own namespace, a person gave it no other audience."""
    is_one = caller.namespace is called.namespace
    audience = experiment_name(called.namespace.name, (caller if is_one else called).name)
    return caller.namespace.kubectl("create", "token", f"{RELEASE}-experiment", f"--audience={audience}").strip()


@contextmanager
def everything_allowed(*namespaces: Namespace) -> Iterator[None]:
    """Have no connection blocked, as in a network that enforces no policies."""
    with ExitStack() as stack:
        for namespace in namespaces:
            namespace.apply(ALLOW_ALL)
            stack.callback(namespace.kubectl, "delete", "networkpolicy", "allow-all")
        yield


@contextmanager
def outside(namespace: Namespace) -> Iterator[str]:
    """Run a pod that everybody may call, in place of a host of the internet, and yield its address."""
    pod = python_pod(namespace, RELEASE, "outside", {}, "-c", LISTEN, *map(str, (*OPEN_PORTS, *OTHER_PORTS)))
    sysctl = {"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}
    pod["spec"]["securityContext"] |= {"sysctls": [sysctl]}
    namespace.apply(pod)
    try:
        namespace.kubectl("wait", "pod", "outside", "--for=condition=Ready", WAIT)
        yield str(namespace.get("pod", "outside")["status"]["podIP"])
    finally:
        namespace.kubectl("delete", "pod", "outside", "--grace-period=0", "--force")


@contextmanager
def results_reader(running: Running) -> Iterator[Place]:
    """Run the pod with which `nexrl get results` reads the volume."""
    experiment = running.get()
    running.namespace.apply(reader_pod(experiment, experiment["status"]["results"], "reader"))
    try:
        running.namespace.kubectl("wait", "pod", "reader", "--for=condition=Ready", WAIT)
        yield Place(running.namespace, "reader", CONTAINER)
    finally:
        running.namespace.kubectl("delete", "pod", "reader", "--grace-period=0", "--force")
