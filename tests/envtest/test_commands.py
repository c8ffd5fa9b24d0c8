"""`nexrl submit`, `status`, `suspend`, `resume`, `audit` and `delete` against a cluster."""

import pytest

from nexrl.errors import (
    CheckFailedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from nexrl.k8s import commands
from nexrl.k8s.api import EXPERIMENT, Api
from nexrl.k8s.commands import Target
from nexrl_controller.events import VersionCommitted
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import operating, until_condition, until_phase

LONG_AGO = "2026-01-01T00:00:00Z"


async def test_an_experiment_is_led_by_commands(
    api: Api, namespace: str, kubelet: Kubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    services, target = Services(), Target("led", namespace)
    document = experiment_object("led", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await commands.submit(document, namespace)
        await until_phase(api, namespace, "led", "Starting")
        await controller.apply(VersionCommitted(0))
        await until_condition(api, namespace, "led", "Ready", "True")
        await commands.print_status(target)
        assert "led: Running" in capsys.readouterr().out
        await commands.print_audit(target)
        assert "granted 10 = trained 8 + dropped 2 + in flight 0; every sample" in capsys.readouterr().out
        await commands.suspend(target, is_suspended=True)
        await until_phase(api, namespace, "led", "Suspended")
        await commands.suspend(target, is_suspended=False)
        await until_phase(api, namespace, "led", "Running")
        with pytest.raises(InvalidArgumentError, match=r"set spec\.suspend to true"):
            await commands.submit(experiment_object("led", namespace, trainer={"steps": 99}), namespace)
        await commands.delete(target)
        with pytest.raises(NotFoundError):
            await commands.print_status(target)


async def test_what_nobody_suspends_is_not_waited_for_without_end(
    api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await api.create(experiment_object("alone", namespace))
    monkeypatch.setattr(commands, "SUSPEND_SECONDS", 2.0)
    with pytest.raises(DeadlineExceededError, match="alone: not Suspended within 2 s"):
        await commands.suspend(Target("alone", namespace), is_suspended=True)
    assert capsys.readouterr().out == "alone: no operator has seen the change yet\n"


async def test_an_unbalanced_ledger_is_an_error(api: Api, namespace: str) -> None:
    await api.create(experiment_object("off", namespace))
    counts = {"granted": 3, "trained": 1, "dropped": 1, "inFlight": 0, "findings": 1, "request": "final"}
    status = {"status": {"phase": "Succeeded", "audit": counts}}
    path = EXPERIMENT.path(namespace, "off", "status")
    await api.request("PATCH", path, body=status, content_type="application/merge-patch+json")
    with pytest.raises(CheckFailedError):
        await commands.print_audit(Target("off", namespace))


async def test_what_is_over_is_neither_suspended_nor_resumed(api: Api, namespace: str) -> None:
    await api.create(experiment_object("over", namespace))
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "Stopped",
        "message": "by hand",
        "lastTransitionTime": LONG_AGO,
    }
    status = {"phase": "Failed", "observedGeneration": 9, "conditions": [failed]}
    path = EXPERIMENT.path(namespace, "over", "status")
    await api.request("PATCH", path, body={"status": status}, content_type="application/merge-patch+json")
    for is_suspended in (True, False):
        with pytest.raises(FailedPreconditionError, match=r"it has ended \(Failed, Stopped: by hand\)"):
            await commands.suspend(Target("over", namespace), is_suspended=is_suspended)
