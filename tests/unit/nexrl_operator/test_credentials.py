"""Certificates, when cert-manager makes them, and the password of the release's Redis."""

import base64
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from prometheus_client import REGISTRY

from nexrl.errors import FailedPreconditionError
from nexrl.k8s.api import Api
from nexrl.spec import parse_experiment
from nexrl.tls import experiment_name
from nexrl_operator import credentials as credentials_module
from nexrl_operator.authority import AUTHORITY_DAYS, issue, new_ca
from nexrl_operator.children import Renderer
from nexrl_operator.credentials import Credentials
from nexrl_operator.objects import RUN_FOLDER, Owner
from tests.support.kubelet import experiment_object, operator_settings

SETTINGS = operator_settings(tls="certManager", own_tls_secret="ours-tls", issuer_name="ours")
FILES = {"ca.crt": b"authority", "tls.crt": b"certificate", "tls.key": b"key"}


class Secrets:
    """Has that Secret under any name."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    async def get(self, *_: object) -> dict[str, Any]:
        return {"data": {name: base64.b64encode(value).decode() for name, value in self._files.items()}}


async def test_operator_takes_the_certificate_that_was_made_for_it(tmp_path: Path) -> None:
    await Credentials(cast("Api", Secrets(FILES)), SETTINGS, tmp_path).begin()
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES


async def test_certificate_that_is_not_made_yet_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="Secret default/ours-tls: does not exist"):
        await Credentials(cast("Api", Secrets({})), SETTINGS, tmp_path).begin()


async def test_certificate_of_an_experiment_goes_with_it(tmp_path: Path) -> None:
    owner = Owner("rl", "x", "uid-1")
    document = experiment_object("x", "rl", redis={"url": "redis://ours:6379"})
    renderer = Renderer(owner, parse_experiment(document, RUN_FOLDER), SETTINGS)
    credentials = Credentials(cast("Api", Secrets(FILES)), SETTINGS, tmp_path)
    [certificate] = await credentials.objects(renderer, is_running=False)
    assert certificate["metadata"]["ownerReferences"] == [owner.reference()]
    assert certificate["spec"]["secretName"] == "x-tls"
    assert {experiment_name("rl", "x"), "x-controller.rl.svc"} <= set(certificate["spec"]["dnsNames"])


@pytest.mark.parametrize(
    ("settings", "certificate"), [({}, "y-tls"), ({"tls": "secret", "tls_secret": "shared"}, "shared")]
)
async def test_the_metrics_say_when_a_certificate_expires_that_others_made(
    tmp_path: Path, settings: dict[str, str], certificate: str
) -> None:
    ca = new_ca()
    made = issue(ca, [], experiment_name("expiry", "y"), days=3)
    files = {"ca.crt": issue(ca, [], "old", days=1).certificate + ca.certificate, "tls.crt": made.certificate}
    known = SETTINGS.model_copy(update={"release_namespace": "expiry", **settings})
    document = experiment_object("y", "expiry", redis={"url": "redis://ours:6379"})
    renderer = Renderer(Owner("expiry", "y", "uid-1"), parse_experiment(document, RUN_FOLDER), known)
    credentials = Credentials(cast("Api", Secrets({**files, "tls.key": made.key})), known, tmp_path)
    await credentials.begin()
    await credentials.objects(renderer, is_running=True)
    assert _days_left("expiry", certificate) == _days_left("expiry", "operator") == 3
    assert _days_left("expiry", "authority") == AUTHORITY_DAYS  # the newest one counts


async def test_the_metric_of_a_shared_certificate_goes_with_the_last_experiment(tmp_path: Path) -> None:
    made = issue(new_ca(), [], experiment_name("shared", "a"), days=3)
    shared = SETTINGS.model_copy(update={"tls": "secret", "tls_secret": "ours"})
    credentials = Credentials(cast("Api", Secrets({**FILES, "tls.crt": made.certificate})), shared, tmp_path)
    owners = [Owner("shared", name, f"uid-{name}") for name in ("a", "b")]
    for owner in owners:
        document = experiment_object(owner.name, "shared", redis={"url": "redis://ours:6379"})
        await credentials.objects(Renderer(owner, parse_experiment(document, RUN_FOLDER), shared), is_running=True)
    credentials.forget_certificate(owners[0])
    credentials.forget_certificate(owners[0])  # once in each reconciliation
    assert _days_left("shared", "ours") == 3
    credentials.forget_certificate(owners[1])
    assert _expires("shared", "ours") is None


def _expires(namespace: str, certificate: str) -> float | None:
    labels = {"namespace": namespace, "certificate": certificate}
    return REGISTRY.get_sample_value("nexrl_certificate_expiration_timestamp_seconds", labels)


def _days_left(namespace: str, certificate: str) -> int:
    ends = _expires(namespace, certificate)
    assert ends is not None
    return round((ends - time.time()) / 86400)


async def test_the_password_of_redis_is_read_once_and_again_when_redis_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, password = 0, "first"

    class Counted:
        async def get(self, *_: object) -> dict[str, Any]:
            nonlocal reads
            reads += 1
            return {"data": {"password": base64.b64encode(password.encode()).decode()}}

    async def connect(url: str) -> AsyncMock:
        if password not in url:
            raise FailedPreconditionError("WRONGPASS")
        return AsyncMock()

    monkeypatch.setattr(credentials_module, "connect_redis", connect)
    settings = operator_settings(redis_secret="redis/password")
    credentials = Credentials(cast("Api", Counted()), settings, tmp_path)

    async def use() -> None:
        async with credentials.release_redis():
            pass

    await use()
    await use()
    assert reads == 1
    password = "second"
    with pytest.raises(FailedPreconditionError):
        await use()
    await use()
    assert reads == 2
