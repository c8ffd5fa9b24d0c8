"""What the release's init container makes: once, whoever asks how often."""

import asyncio
import base64
import ssl
from contextlib import suppress
from pathlib import Path

from nexrl.k8s.api import SECRET, Api, Object
from nexrl_controller.release_secrets import ReleaseSettings, make_secrets

NAMESPACE = "default"
LABELS = {"app.kubernetes.io/instance": "trial"}


async def test_secrets_are_made_once_and_owned_by_the_operator(api: Api, tmp_path: Path) -> None:
    owner = await api.create(_deployment("trial-operator"))
    settings = ReleaseSettings(
        namespace=NAMESPACE,
        deployment="trial-operator",
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
        assert [each["uid"] for each in found["metadata"]["ownerReferences"]] == [owner["metadata"]["uid"]]


async def test_only_what_is_asked_for_is_made(api: Api) -> None:
    await api.create(_deployment("plain-operator"))
    settings = ReleaseSettings(namespace=NAMESPACE, deployment="plain-operator", redis_secret="plain-redis")
    await make_secrets(api, settings)
    assert await api.get(SECRET, NAMESPACE, "plain-redis")
    assert not await api.get(SECRET, NAMESPACE, "plain-ca")


def _deployment(name: str) -> Object:
    pod = {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "operator", "image": "none"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": LABELS},
        "spec": {"selector": {"matchLabels": LABELS}, "template": pod},
    }


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
