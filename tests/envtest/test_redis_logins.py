"""The user of each experiment in Redis, with an operator, a real API server and a real Redis; the kubelet is played."""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from urllib.parse import quote

import pytest

from nexrl.k8s.api import DEPLOYMENT, EXPERIMENT, POD, SECRET, STATEFUL_SET, Api
from nexrl.store import connect_redis, key_prefix
from nexrl_operator import redis_logins
from nexrl_operator.objects import Owner
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.ledger_run import program
from tests.support.operator import condition, operating, run, until_condition, until_gone, until_phase
from tests.support.patience import eventually
from tests.support.redis_servers import Server, folder, running

SHARED = "the-password-of-the-release"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator looks often for what Redis has forgotten."""
    monkeypatch.setattr(redis_logins, "CHECK_SECONDS", 0.05)


@pytest.fixture
def server() -> Iterator[Server]:
    """A Redis that knows the operator's user when it starts, and forgets all others. The tests need no password."""
    administrator = ("--user", "administrator", "on", f">{SHARED}", "~*", "&*", "+@all")
    with folder() as path, running(made := Server(program("redis-6.2"), path, *administrator)):
        yield made


@asynccontextmanager
async def released(api: Api, namespace: str, server: Server, services: Services) -> AsyncIterator[None]:
    """An operator of a release with this Redis."""
    await put_secret(api, namespace, "redis", {"password": SHARED})
    url = f"unix://administrator@{server.socket}"
    async with operating(api, namespace, services, redis_url=url, redis_secret="redis/password"):
        yield


async def put_secret(api: Api, namespace: str, name: str, content: dict[str, str], owner: Owner | None = None) -> None:
    """Create a Secret, or replace what it contains."""
    owned = {"ownerReferences": [owner.reference()]} if owner else {}
    data = {key: base64.b64encode(value.encode()).decode() for key, value in content.items()}
    if await api.get(SECRET, namespace, name) is not None:
        await api.delete(SECRET, namespace, name)
    metadata = {"name": name, "namespace": namespace, **owned}
    await api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})


async def login_of(api: Api, namespace: str, name: str) -> dict[str, str]:
    """Return what the Secret of an experiment contains."""
    found = await api.get(SECRET, namespace, f"{name}-redis")
    assert found is not None
    return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}


def users(server: Server) -> set[str]:
    """Return the users that Redis knows."""
    return {name.decode() for name in server.ask("ACL", "USERS")}


async def test_an_experiment_has_a_user_of_its_own_until_it_is_deleted(
    api: Api, namespace: str, kubelet: Kubelet, server: Server
) -> None:
    services, document = Services(), experiment_object("one", namespace)
    async with services.serving(document), released(api, namespace, server, services):
        made = await api.apply(document, manager="test")
        await until_phase(api, namespace, "one", "Starting")
        ledger = Owner(namespace, "one", made["metadata"]["uid"]).ledger
        login = await login_of(api, namespace, "one")
        assert login["username"] == ledger
        assert login["password"] != SHARED
        workload = await api.get(DEPLOYMENT, namespace, "one-trajectory-pool")
        assert workload is not None
        told = {each["name"]: each for each in workload["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert told["NEXRL_REDIS_URL"]["value"] == f"unix://{ledger}@{server.socket}"
        assert told["NEXRL_REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "one-redis", "key": "password"}
        url = f"unix://{ledger}:{quote(login['password'])}@{server.socket}"
        async with aclosing(await connect_redis(url)) as redis:
            await redis.set(f"{key_prefix(ledger, 'model')}x", 1)

        assert b"cmdstat_scan" not in server.ask("INFO", "commandstats")  # of a new experiment no key expires
        server.end()
        server.start()
        assert ledger not in users(server)
        async with aclosing(await connect_redis(url, wait_seconds=30)):
            assert ledger in users(server)  # the same password opens it

        await api.delete(EXPERIMENT, namespace, "one")

        async def is_gone() -> bool:
            return ledger not in users(server)

        await eventually(is_gone)
        # speed: nor is it made again, which no event tells
        await asyncio.sleep(10 * redis_logins.CHECK_SECONDS)
        assert await is_gone()


async def test_a_login_without_its_password_is_written_again_by_the_next_operator(
    api: Api, namespace: str, kubelet: Kubelet, server: Server
) -> None:
    services, document = Services(), experiment_object("torn", namespace)
    async with services.serving(document):
        async with released(api, namespace, server, services):
            await api.apply(document, manager="test")
            await until_phase(api, namespace, "torn", "Starting")
        await api.merge(SECRET, namespace, "torn-redis", {"data": {"password": None}})
        async with released(api, namespace, server, services):

            async def is_whole() -> bool:
                return (await login_of(api, namespace, "torn")).keys() == {"username", "password"}

            await eventually(is_whole)


async def test_a_user_that_redis_forgets_while_the_pods_stop_is_made_again_by_the_next_operator(
    api: Api, namespace: str, kubelet: Kubelet, server: Server
) -> None:
    services, document = Services(), experiment_object("last", namespace)
    async with services.serving(document) as controller:
        async with released(api, namespace, server, services):
            await run(api, document, controller)
            ledger = (await login_of(api, namespace, "last"))["username"]
            held = {"metadata": {"finalizers": ["example.com/still-writes"]}}
            await api.merge(POD, namespace, "last-controller-0", held)
            await api.merge(EXPERIMENT, namespace, "last", {"spec": {"suspend": True}})
            await until_phase(api, namespace, "last", "Suspending")
        server.end()
        server.start()
        assert ledger not in users(server)
        async with released(api, namespace, server, services):

            async def is_back() -> bool:
                return ledger in users(server)

            await eventually(is_back)


async def test_the_keys_of_a_finished_experiment_get_the_end_that_it_names(
    api: Api, namespace: str, kubelet: Kubelet, server: Server
) -> None:
    services, document = Services(), experiment_object("two", namespace, redis={"ttlSecondsAfterFinished": 5000})
    async with services.serving(document) as controller, released(api, namespace, server, services):
        await run(api, document, controller)
        key = f"{key_prefix((await login_of(api, namespace, 'two'))['username'], 'model')}x"
        server.ask("SET", key, 1)
        await controller.post_metrics("m1", 4, {"training_complete": 1})
        await until_phase(api, namespace, "two", "Succeeded")

        async def ends() -> bool:
            return 4000 < int(server.ask("TTL", key)) <= 5000

        await eventually(ends)


async def test_the_keys_of_a_failed_experiment_are_kept_once_it_is_to_be_resumed(
    api: Api, namespace: str, kubelet: Kubelet, server: Server
) -> None:
    services, document = Services(), experiment_object("ill", namespace, failurePolicy={"maxRestarts": 0})
    async with released(api, namespace, server, services):
        async with services.serving(document) as controller:
            await run(api, document, controller)
            ledger = (await login_of(api, namespace, "ill"))["username"]
            key = f"{key_prefix(ledger, 'model')}x"
            server.ask("SET", key, 1)
            await kubelet.fail("ill-trainer-1-0", 1, "broken")
            await until_phase(api, namespace, "ill", "Failed")
            await until_gone(api, namespace)

        async def ends() -> bool:
            return int(server.ask("TTL", key)) > 0

        await eventually(ends)
        await api.merge(EXPERIMENT, namespace, "ill", {"spec": {"suspend": True}})

        async def is_kept() -> bool:
            return int(server.ask("TTL", key)) == -1

        await eventually(is_kept)


async def test_a_redis_that_lets_nobody_make_users_is_named(
    api: Api, namespace: str, kubelet: Kubelet, server: Server
) -> None:
    server.ask("ACL", "SETUSER", "administrator", "-acl")
    services, document = Services(), experiment_object("three", namespace)
    async with services.serving(document), released(api, namespace, server, services):
        await api.apply(document, manager="test")
        await until_condition(api, namespace, "three", "Accepted", "False")
        accepted = await condition(api, namespace, "three", "Accepted")
        assert accepted["reason"] == "MissingPrerequisite"
        assert "+acl|setuser" in accepted["message"]
        assert not (await api.list(DEPLOYMENT, namespace))["items"]


async def test_what_an_older_release_started_keeps_its_password_until_it_starts_again(
    api: Api, namespace: str, kubelet: Kubelet, server: Server
) -> None:
    services, document = Services(), experiment_object("four", namespace)
    async with services.serving(document) as controller:
        async with released(api, namespace, server, services):
            await run(api, document, controller)
        found = await api.get(EXPERIMENT, namespace, "four")
        assert found is not None
        owner = Owner(namespace, "four", found["metadata"]["uid"])
        await put_secret(api, namespace, "four-redis", {"password": SHARED}, owner)
        async with released(api, namespace, server, services):
            await api.merge(EXPERIMENT, namespace, "four", {"spec": {"rollout": {"replicas": 3}}})

            async def has_three() -> bool:
                workload = await api.get(STATEFUL_SET, namespace, "four-rollout")
                return workload is not None and bool(workload["spec"]["replicas"] == 3)

            await eventually(has_three)  # after it has looked at the Secrets
            assert await login_of(api, namespace, "four") == {"password": SHARED}
            await api.merge(EXPERIMENT, namespace, "four", {"spec": {"suspend": True}})
            await until_phase(api, namespace, "four", "Suspended")
            await api.merge(EXPERIMENT, namespace, "four", {"spec": {"suspend": False}})

            async def has_login() -> bool:
                return (await login_of(api, namespace, "four")).get("username") == owner.ledger

            await eventually(has_login)
