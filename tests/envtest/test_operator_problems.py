"""Wrong specs, refused objects and failed starts, with an operator and a real API server; the kubelet is played."""

import asyncio
import shutil
from typing import Any

import pytest

from nexrl.k8s.api import (
    CONFIG_MAP,
    EXPERIMENT,
    JOB,
    POD,
    Api,
    ApiError,
)
from nexrl_controller.attempts import Count, FailedAttempt
from nexrl_controller.events import AttemptsCounted
from nexrl_operator import executor
from tests.support.cluster import command
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import condition, operating, run, until_condition, until_gone, until_phase
from tests.support.patience import eventually

Object = dict[str, Any]


async def test_what_runs_is_suspended_whatever_else_its_spec_has_wrong(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("wrong", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        # Nobody but the operator's own reading of the spec sees what is wrong with it.
        wrong = {"suspend": True, "redis": {"url": "redis://ours.example:99999"}}
        await api.merge(EXPERIMENT, namespace, "wrong", {"spec": wrong})
        await until_phase(api, namespace, "wrong", "Suspended")
        accepted = await condition(api, namespace, "wrong", "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
        assert "spec.redis.url" in accepted["message"]
        assert not (await api.list(POD, namespace))["items"]
        await api.merge(EXPERIMENT, namespace, "wrong", {"spec": {"suspend": False}})
        await until_condition(api, namespace, "wrong", "Suspended", "False")
        assert not (await api.list(POD, namespace))["items"]
        await api.merge(EXPERIMENT, namespace, "wrong", {"spec": {"suspend": True}})
        await api.merge(EXPERIMENT, namespace, "wrong", {"spec": {"redis": None}})
        await api.merge(EXPERIMENT, namespace, "wrong", {"spec": {"suspend": False}})
        await until_phase(api, namespace, "wrong", "Running")


@pytest.mark.parametrize(
    ("container", "word"), [({"resources": {"limits": {"cpu": "many"}}}, "quantit"), ({"image": 7}, "image")]
)
async def test_an_experiment_whose_template_is_no_pod_says_so(
    api: Api, namespace: str, kubelet: Kubelet, container: Object, word: str
) -> None:
    template = {"spec": {"containers": [{"name": "nexrl", **container}]}}
    services = Services()
    document = experiment_object("six", namespace, trainer={"steps": 4, "template": template})
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")

        async def refused() -> bool:
            return (await condition(api, namespace, "six", "Accepted")).get("status") == "False"

        await eventually(refused)
        accepted = await condition(api, namespace, "six", "Accepted")
        assert accepted["reason"] == "InvalidTemplate"
        assert word in accepted["message"]


async def test_what_has_a_name_that_it_needs_stays_untouched(api: Api, namespace: str, kubelet: Kubelet) -> None:
    services, document = Services(), experiment_object("taken", namespace, startupDeadlineSeconds=5)
    metadata = {"name": "taken-experiment", "namespace": namespace}
    await api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}})
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")
        await until_condition(api, namespace, "taken", "Accepted", "False")
        accepted = await condition(api, namespace, "taken", "Accepted")
        assert accepted["reason"] == "NameTaken"
        assert "ConfigMap taken-experiment" in accepted["message"]
        found = await api.get(CONFIG_MAP, namespace, "taken-experiment")
        assert found is not None
        assert found["data"] == {"a": "b"}
        assert not (await api.list(POD, namespace))["items"]
        await until_phase(api, namespace, "taken", "Failed")
        assert (await condition(api, namespace, "taken", "Failed"))["reason"] == "StartupDeadlineExceeded"


async def test_a_start_that_takes_too_long_fails_and_says_what_was_missing(
    api: Api, namespace: str, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "AUDITING_SECONDS", 1.0)
    kubelet.is_ready = False
    services, document = Services(), experiment_object("seven", namespace, startupDeadlineSeconds=2)
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")
        await until_phase(api, namespace, "seven", "Failed")
        failed = await condition(api, namespace, "seven", "Failed")
        assert failed["reason"] == "StartupDeadlineExceeded"
        await until_gone(api, namespace)
        found = await api.get(EXPERIMENT, namespace, "seven")
        assert found is not None
        assert found["status"]["audit"] == {"request": "final", "problem": "no pod of the trajectory pool is ready"}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl on the PATH")
async def test_kubectl_shows_at_a_glance_why_an_experiment_has_failed(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("glance", namespace, activeDeadlineSeconds=1)
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")
        await until_phase(api, namespace, "glance", "Failed")
        await until_gone(api, namespace)

        async def is_shown() -> bool:
            shown = await asyncio.to_thread(command, "kubectl", "get", "experiments", "--output=wide", "-n", namespace)
            return "DeadlineExceeded" in shown and "which is spec.activeDeadlineSeconds" in shown

        await eventually(is_shown)


async def test_a_change_that_is_refused_keeps_the_trainer_from_nothing(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("ten", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        wrong = {"spec": {"containers": [{"name": "nexrl", "resources": {"limits": {"cpu": "many"}}}]}}
        await api.merge(EXPERIMENT, namespace, "ten", {"spec": {"rollout": {"template": wrong}}})
        await until_condition(api, namespace, "ten", "Accepted", "False")
        await kubelet.fail("ten-trainer-1-0", 137, "killed")

        async def is_second() -> bool:
            return await api.get(JOB, namespace, "ten-trainer-2") is not None

        await eventually(is_second)
        assert (await condition(api, namespace, "ten", "Accepted"))["reason"] == "InvalidTemplate"


async def test_samples_that_fail_are_named_in_the_status_and_end_the_experiment(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("fails", namespace)
    last = FailedAttempt("0.0", "rollout-0", "REWARD_ERROR", "ValueError (/code/mine.py:12): no answer")
    told = "sample 0.0 of rollout-0: REWARD_ERROR: ValueError (/code/mine.py:12): no answer; fix the reward function"
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        await controller.apply(AttemptsCounted(Count(0, 0), None))
        await controller.apply(AttemptsCounted(Count(40, 30), last))
        await until_condition(api, namespace, "fails", "SamplesFailing", "True")
        failing = await condition(api, namespace, "fails", "SamplesFailing")
        assert failing["message"] == f"75 % of the last 40 attempts at samples failed; the newest, {told}"
        await controller.apply(AttemptsCounted(Count(400, 30), last))
        await until_condition(api, namespace, "fails", "SamplesFailing", "")
        await controller.apply(AttemptsCounted(Count(2000, 1630), last))
        await until_phase(api, namespace, "fails", "Failed")
        failed = await condition(api, namespace, "fails", "Failed")
        assert failed["reason"] == "SamplesFailing"
        assert told in failed["message"]
        assert await condition(api, namespace, "fails", "SamplesFailing")


async def test_what_has_been_made_again_is_not_deleted_for_what_it_was(api: Api, namespace: str) -> None:
    metadata = {"name": "again", "namespace": namespace}
    made = await api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    with pytest.raises(ApiError, match="UID"):
        await api.delete(CONFIG_MAP, namespace, "again", "another")
    assert await api.delete(CONFIG_MAP, namespace, "again", made["metadata"]["uid"])
    assert not await api.delete(CONFIG_MAP, namespace, "again", made["metadata"]["uid"])
