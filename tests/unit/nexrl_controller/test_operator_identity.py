"""Certificates, when cert-manager makes them."""

import base64
from pathlib import Path
from typing import Any, cast

import pytest

from nexrl.errors import FailedPreconditionError
from nexrl.k8s.api import Api
from nexrl.spec import parse_experiment
from nexrl.tls import experiment_name
from nexrl_controller.operator import identity as module
from nexrl_controller.operator.children import RUN_FOLDER, Owner, Renderer
from nexrl_controller.operator.identity import Identity
from tests.support.kubelet import experiment_object, operator_settings

SETTINGS = operator_settings(tls="certManager", own_tls_secret="ours-tls", issuer_name="ours")
FILES = {"ca.crt": b"authority", "tls.crt": b"certificate", "tls.key": b"key"}


class SlowlyMade:
    """Has the Secret from the n-th time on that it is asked for; at first it is empty, as cert-manager may make it."""

    def __init__(self, asked_before: int) -> None:
        self._asked_before = asked_before

    async def get(self, *_: object) -> dict[str, Any]:
        self._asked_before -= 1
        if self._asked_before >= 0:
            return {"data": {}}
        return {"data": {name: base64.b64encode(value).decode() for name, value in FILES.items()}}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.0)


async def test_operator_waits_for_its_certificate(tmp_path: Path) -> None:
    await Identity(cast("Api", SlowlyMade(asked_before=2)), SETTINGS, tmp_path).begin()
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES


async def test_certificate_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="Secret default/ours-tls: not there"):
        await Identity(cast("Api", SlowlyMade(asked_before=100)), SETTINGS, tmp_path).begin()


async def test_certificate_of_an_experiment_goes_with_it(tmp_path: Path) -> None:
    owner = Owner("rl", "x", "uid-1")
    renderer = Renderer(owner, parse_experiment(experiment_object("x", "rl"), RUN_FOLDER), SETTINGS)
    [certificate] = await Identity(cast("Api", SlowlyMade(0)), SETTINGS, tmp_path).objects(renderer)
    assert certificate["metadata"]["ownerReferences"] == [owner.reference()]
    assert certificate["spec"]["secretName"] == "x-tls"
    assert {experiment_name("rl", "x"), "x-controller.rl.svc"} <= set(certificate["spec"]["dnsNames"])
