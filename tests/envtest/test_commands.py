"""`nexrl submit`, `status`, `suspend`, `resume`, `audit` and `delete` against a cluster."""

import asyncio

import pytest

from nexrl.errors import (
    CheckFailedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from nexrl.k8s import commands
from nexrl.k8s.api import CONFIG_MAP, EXPERIMENT, JOB, Api, ApiError
from nexrl.k8s.commands import Target
from nexrl.spec.experiment import GENERATION_ANNOTATION
from nexrl_controller.events import ComponentExited, VersionCommitted
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import condition, operating, run, until_condition, until_gone, until_phase


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
        led = await api.get(EXPERIMENT, namespace, "led")
        assert led is not None
        assert led["status"]["results"] == {"claim": "led-run", "image": "test/control:1"}
        await commands.print_audit(target)
        assert "granted 10 = trained 8 + dropped 2 + in flight 0; every sample" in capsys.readouterr().out
        await commands.suspend(target)
        await until_phase(api, namespace, "led", "Suspended")
        await commands.resume(target)
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
        await commands.suspend(Target("alone", namespace))
    assert capsys.readouterr().out == "alone: no operator has seen the change yet\n"


async def test_an_unbalanced_ledger_is_an_error(api: Api, namespace: str) -> None:
    await api.create(experiment_object("off", namespace))
    counts = {"granted": 3, "trained": 1, "dropped": 1, "inFlight": 0, "findings": 1, "request": "final"}
    status = {"status": {"phase": "Succeeded", "audit": counts}}
    path = EXPERIMENT.path(namespace, "off", "status")
    await api.request("PATCH", path, body=status, content_type="application/merge-patch+json")
    with pytest.raises(CheckFailedError):
        await commands.print_audit(Target("off", namespace))


async def test_what_has_succeeded_is_neither_suspended_nor_resumed(api: Api, namespace: str) -> None:
    await api.create(experiment_object("over", namespace))
    path = EXPERIMENT.path(namespace, "over", "status")
    status = {"phase": "Succeeded", "observedGeneration": 9}
    await api.request("PATCH", path, body={"status": status}, content_type="application/merge-patch+json")
    for command in (commands.suspend, commands.resume):
        with pytest.raises(FailedPreconditionError, match=r"it has ended \(Succeeded\)"):
            await command(Target("over", namespace))


async def test_a_failed_experiment_says_how_to_resume_it_and_is_resumed_with_all_its_restarts(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services = Services()
    document = experiment_object("ill", namespace, failurePolicy={"maxRestarts": 1})
    async with operating(api, namespace, services):
        async with services.serving(document) as controller:
            await run(api, document, controller)
            await controller.report_exit(ComponentExited("e1", "trainer", 1, ""))
            await kubelet.fail("ill-trainer-1-0", 1, "broken")
            await until_phase(api, namespace, "ill", "Failed")
            await until_gone(api, namespace)
        said = (await condition(api, namespace, "ill", "Failed"))["message"]
        assert said.startswith("trainer ended with exit code 1: broken; it was restarted 1 times")
        assert "\nTo start it again from its newest checkpoint, correct the cause" in said
        assert "`nexrl resume ill`, or set spec.suspend to true and, when the phase is Suspended, to false" in said
        with pytest.raises(ApiError, match=r"set spec\.suspend to true to change spec\.failurePolicy"):
            await api.merge(EXPERIMENT, namespace, "ill", {"spec": {"failurePolicy": {"maxRestarts": 9}}})

        # What its pods read: the generation after two changes of spec.suspend.
        document["metadata"]["annotations"] = {GENERATION_ANNOTATION: "3"}
        async with services.serving(document) as controller:
            resuming = asyncio.create_task(commands.resume(Target("ill", namespace)))
            await until_phase(api, namespace, "ill", "Starting")
            await controller.apply(VersionCommitted(0))
            await resuming
            assert controller.state.exits["trainer"].counted == 0
            configuration = await api.get(CONFIG_MAP, namespace, "ill-experiment")
            assert configuration is not None
            assert f"{GENERATION_ANNOTATION}: '3'" in configuration["data"]["experiment.yaml"]
            found = await api.get(EXPERIMENT, namespace, "ill")
            assert found is not None
            assert not {"audit", "completionTime"} & found["status"].keys()
            assert await api.get(JOB, namespace, "ill-trainer-2")
            await controller.post_metrics("m1", 4, {"training_complete": 1})
            await until_phase(api, namespace, "ill", "Succeeded")
            assert not await condition(api, namespace, "ill", "Failed")
