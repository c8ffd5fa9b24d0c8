"""The Secrets of a release: its init container creates them once, even if it runs again."""

import asyncio
import base64
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from nexrl.errors import FailedPreconditionError
from nexrl.k8s.api import CONFIG_MAP, SECRET, Api, Object
from nexrl_operator.release_secrets import ReleaseSettings, make_secrets

NAMESPACE = "default"
LABELS = {"app.kubernetes.io/instance": "trial"}


async def test_secrets_are_made_once_and_go_with_the_release(api: Api, tmp_path: Path) -> None:
    owner = await api.create(_owner("trial"))
    settings = ReleaseSettings(
        namespace=NAMESPACE,
        owner="trial",
        redis_host="trial-redis",
        redis_secret="trial-redis",
        redis_tls_secret="trial-redis-tls",
        ca_secret="trial-ca",
    )
    await asyncio.gather(*(make_secrets(api, settings) for _ in range(3)))  # three pods of the operator at once
    first = [await _data(api, name) for name in ("trial-redis", "trial-ca", "trial-redis-tls")]
    await make_secrets(api, settings)
    assert [await _data(api, name) for name in ("trial-redis", "trial-ca", "trial-redis-tls")] == first

    password, authority, shown = first
    assert len(password["password"]) > 30
    assert shown["ca.crt"] == authority["tls.crt"]
    _assert_shown_certificate_is_of(authority["tls.crt"], shown, tmp_path)
    for name in ("trial-redis", "trial-ca", "trial-redis-tls"):
        found = await api.get(SECRET, NAMESPACE, name)
        assert found
        assert found["metadata"]["labels"] == LABELS
        assert await _owners(api, name) == [owner["metadata"]["uid"]]


async def test_only_what_is_asked_for_is_made(api: Api) -> None:
    await api.create(_owner("plain"))
    settings = ReleaseSettings(namespace=NAMESPACE, owner="plain", redis_secret="plain-redis")
    await make_secrets(api, settings)
    assert await api.get(SECRET, NAMESPACE, "plain-redis")
    assert not await api.get(SECRET, NAMESPACE, "plain-ca")


async def test_those_of_a_release_before_are_taken_over_before_they_are_collected(api: Api) -> None:
    settings = ReleaseSettings(namespace=NAMESPACE, owner="again", redis_secret="again-redis")
    before = await api.create(_owner("again"))
    await make_secrets(api, settings)
    password = await _data(api, "again-redis")
    await api.delete(CONFIG_MAP, NAMESPACE, "again")  # no garbage collector runs here
    after = await api.create(_owner("again"))
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    await asyncio.gather(*(make_secrets(api, settings) for _ in range(3)))
    assert await _owners(api, "again-redis") == [after["metadata"]["uid"]]
    assert await _data(api, "again-redis") == password


@pytest.mark.parametrize("owners", [[], [{"uid": "0-1", "controller": True}]], ids=["no owner", "a controller"])
async def test_secret_of_the_user_stays_as_it_is(api: Api, owners: list[Object]) -> None:
    name = f"own-{len(owners)}"
    await api.create(_owner(name))
    kind = {"apiVersion": "v1", "kind": "ConfigMap", "name": "another"}
    metadata = {"name": name, "namespace": NAMESPACE, "ownerReferences": [kind | owner for owner in owners]}
    data = {"password": base64.b64encode(b"own").decode()}
    made = await api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    await make_secrets(api, ReleaseSettings(namespace=NAMESPACE, owner=name, redis_secret=name))
    found = await api.get(SECRET, NAMESPACE, name)
    assert found
    assert found["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_owner_that_is_not_there_is_named(api: Api) -> None:
    with pytest.raises(FailedPreconditionError, match="ConfigMap default/nobody"):
        await make_secrets(api, ReleaseSettings(namespace=NAMESPACE, owner="nobody", redis_secret="nobodys"))
    assert not await api.get(SECRET, NAMESPACE, "nobodys")


def _owner(name: str) -> Object:
    metadata = {"name": name, "namespace": NAMESPACE, "labels": LABELS}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


async def _owners(api: Api, name: str) -> list[str]:
    found = await api.get(SECRET, NAMESPACE, name)
    assert found
    return [owner["uid"] for owner in found["metadata"]["ownerReferences"]]


async def _data(api: Api, name: str) -> dict[str, bytes]:
    found = await api.get(SECRET, NAMESPACE, name)
    assert found
    return {key: base64.b64decode(value) for key, value in found["data"].items()}


def _assert_shown_certificate_is_of(authority: bytes, shown: dict[str, bytes], folder: Path) -> None:
    """As a client of Redis would see it."""
    for name, content in shown.items():
        (folder / name).write_bytes(content)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    client = ssl.create_default_context(cadata=authority.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = server.wrap_bio(to_server, to_client, server_side=True)
    asking = client.wrap_bio(to_client, to_server, server_hostname=f"trial-redis.{NAMESPACE}.svc")
    for _ in range(4):
        for side in (asking, accepting):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert asking.getpeercert()
