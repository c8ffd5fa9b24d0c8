"""The operator against a real API server; the kubelet is played, the experiments' controllers are real."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from nexrl.k8s.api import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    EXPERIMENT,
    JOB,
    NETWORK_POLICY,
    POD,
    SERVICE,
    STATEFUL_SET,
    Api,
    ApiError,
)
from nexrl.store import connect_redis, key_prefix
from nexrl_controller.controller import Controller
from nexrl_controller.events import VersionCommitted
from nexrl_controller.operator import reconciler as reconciler_module
from nexrl_controller.operator.observed import owner_uid
from nexrl_controller.operator.server import Operator
from tests.support.eventually import eventually
from tests.support.kubelet import Kubelet, Services, experiment_object, operator_settings
from tests.support.redis import running_redis

Object = dict[str, Any]


@pytest.fixture
async def namespace(api: Api) -> str:
    """A namespace of its own for the test."""
    name = f"test-{uuid4().hex[:8]}"
    await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    return name


@pytest.fixture
async def kubelet(api: Api, namespace: str) -> AsyncIterator[Kubelet]:
    """Pods come and go with their workloads."""
    kubelet = Kubelet(api, namespace)
    playing = asyncio.create_task(kubelet.play())
    yield kubelet
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


@asynccontextmanager
async def operating(api: Api, namespace: str, services: Services, **settings: Any) -> AsyncIterator[Operator]:
    """An operator of that namespace, while the block runs."""
    known = operator_settings(namespace=namespace, release_namespace=namespace, **settings)
    operator = Operator(api, known, services.connect)
    running = asyncio.create_task(operator.run())
    try:
        yield operator
    finally:
        running.cancel()
        for result in await asyncio.gather(running, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


async def condition(api: Api, namespace: str, name: str, kind: str) -> Object:
    found = await api.get(EXPERIMENT, namespace, name)
    conditions = (found or {}).get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


async def phase(api: Api, namespace: str, name: str) -> str:
    found = await api.get(EXPERIMENT, namespace, name)
    return str((found or {}).get("status", {}).get("phase", ""))


async def until_phase(api: Api, namespace: str, name: str, wanted: str) -> None:
    async def is_there() -> bool:
        return await phase(api, namespace, name) == wanted

    await eventually(is_there)


async def run(api: Api, document: Object, controller: Controller) -> None:
    """Apply an experiment, and have its controller say that the first version is committed, by which it trains."""
    await api.apply(document, manager="test")
    name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
    await until_phase(api, namespace, name, "Starting")
    await controller.apply(VersionCommitted(0))
    await until_phase(api, namespace, name, "Running")


async def until_condition(api: Api, namespace: str, name: str, kind: str, status: str) -> None:
    async def holds() -> bool:
        return (await condition(api, namespace, name, kind)).get("status") == status

    await eventually(holds)


async def until_gone(api: Api, namespace: str) -> None:
    async def is_gone() -> bool:
        return not (await api.list(POD, namespace))["items"]

    await eventually(is_gone)


async def test_an_experiment_runs_to_its_end(api: Api, namespace: str, kubelet: Kubelet) -> None:
    services, document = Services(), experiment_object("one", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        await until_condition(api, namespace, "one", "Ready", "True")
        await controller.post_metrics("m1", 4, {"reward_mean": 0.75})
        await controller.post_metrics("m2", 4, {"training_complete": 1})
        await until_phase(api, namespace, "one", "Succeeded")
        await until_gone(api, namespace)
    found = await api.get(EXPERIMENT, namespace, "one")
    assert found is not None
    status = found["status"]
    assert status["progress"]["step"] == 4
    assert status["progress"]["reward"] == "0.75"
    assert status["audit"] == {
        "request": "final",
        **{"granted": 10, "trained": 8, "dropped": 2, "inFlight": 0, "findings": 0},
    }
    complete = await condition(api, namespace, "one", "Complete")
    assert (complete["status"], complete["reason"]) == ("True", "Completed")
    for kind in (DEPLOYMENT, STATEFUL_SET, JOB):
        assert not (await api.list(kind, namespace))["items"]
    [claim] = (await api.list(CLAIM, namespace))["items"]  # the results stay with the experiment
    assert claim["metadata"]["ownerReferences"][0]["uid"] == found["metadata"]["uid"]
    reasons = {event["reason"] for event in (await api.list(EVENT, namespace))["items"]}
    assert {"Starting", "Running", "Succeeded", "CreatedJob"} <= reasons


async def collect_garbage(api: Api, namespace: str, owner: str) -> None:
    """What a cluster does for an owner that was deleted; a bare API server has nobody for it."""
    for kind in (CONFIG_MAP, CLAIM, SERVICE, NETWORK_POLICY, DEPLOYMENT, STATEFUL_SET, JOB):
        for item in (await api.list(kind, namespace))["items"]:
            if owner_uid(item) == owner:
                await api.merge(kind, namespace, item["metadata"]["name"], {"metadata": {"finalizers": None}})
                await api.delete(kind, namespace, item["metadata"]["name"])


async def test_an_experiment_of_the_name_of_one_that_has_ended_begins_anew(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("again", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        first = await api.apply(document, manager="test")
        await until_phase(api, namespace, "again", "Starting")
        await controller.post_metrics("m1", 4, {"training_complete": 1})
        await until_phase(api, namespace, "again", "Stopping")
        await api.delete(EXPERIMENT, namespace, "again")
        second = await api.apply(document, manager="test")  # before anything of the first has gone
        await until_condition(api, namespace, "again", "Accepted", "True")
        await collect_garbage(api, namespace, first["metadata"]["uid"])

        async def has_begun() -> bool:
            events = (await api.list(EVENT, namespace))["items"]
            made = [event for event in events if event["regarding"].get("uid") == second["metadata"]["uid"]]
            return "CreatedJob" in {event["reason"] for event in made}

        await eventually(has_begun)


async def test_suspension_takes_all_pods_away_and_resumption_makes_another_trainer(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("two", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        await api.merge(EXPERIMENT, namespace, "two", {"spec": {"suspend": True}})
        await until_phase(api, namespace, "two", "Suspended")
        assert not (await api.list(POD, namespace))["items"]
        found = await api.get(EXPERIMENT, namespace, "two")
        assert found is not None
        assert "startTime" not in found["status"]
        await api.merge(EXPERIMENT, namespace, "two", {"spec": {"suspend": False, "trainer": {"steps": 9}}})
        await until_phase(api, namespace, "two", "Running")
        [job] = (await api.list(JOB, namespace))["items"]
        assert job["metadata"]["name"] == "two-trainer-2"
        configuration = await api.request("GET", f"/api/v1/namespaces/{namespace}/configmaps/two-experiment")
        assert "steps: 9" in configuration["data"]["experiment.yaml"]


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


async def test_an_experiment_that_is_created_suspended_has_no_pods(api: Api, namespace: str, kubelet: Kubelet) -> None:
    services, document = Services(), experiment_object("three", namespace, suspend=True)
    # A worker of somebody else, labelled so that the experiment's NetworkPolicy lets it in, is not the operator's.
    labels = {"nexrl.dev/experiment": "three", "app.kubernetes.io/component": "rollout"}
    worker = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "worker", "namespace": namespace, "labels": labels},
    }
    await api.create(worker | {"spec": {"containers": [{"name": "worker", "image": "worker"}]}})
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")
        await until_phase(api, namespace, "three", "Suspended")
        assert not (await api.list(JOB, namespace))["items"]


async def test_a_failed_trainer_is_followed_by_the_next_attempt(api: Api, namespace: str, kubelet: Kubelet) -> None:
    services, document = Services(), experiment_object("four", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        await kubelet.fail("four-trainer-1-0", 137, "killed")

        async def is_second() -> bool:
            return await api.get(JOB, namespace, "four-trainer-2") is not None

        await eventually(is_second)
        assert controller.state.exits["trainer"].restarts == 1
        assert "SIGKILL" in controller.state.message
        await controller.heartbeat(_trainer(), [])
        await until_phase(api, namespace, "four", "Running")


def _trainer() -> Any:
    from nexrl_controller.activity import Module

    return Module("trainer", "trainer")


async def test_an_operator_that_starts_again_changes_nothing_of_what_runs(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("five", namespace)
    async with services.serving(document) as controller:
        async with operating(api, namespace, services):
            await run(api, document, controller)
        before = await _generations(api, namespace)
        async with operating(api, namespace, services, image_trainer="test/trainer:2", pod_name="operator-1") as other:
            await eventually(_is_reconciled(other, (namespace, "five")))
            await api.merge(EXPERIMENT, namespace, "five", {"spec": {"rollout": {"replicas": 3}}})

            async def has_three() -> bool:
                found = await api.get(EXPERIMENT, namespace, "five")
                return bool(found and found["status"]["rollout"]["readyReplicas"] == 3)

            await eventually(has_three)
        after = await _generations(api, namespace)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert changed == {"StatefulSet five-rollout"}


def _is_reconciled(operator: Operator, key: tuple[str, str]) -> Any:
    async def is_seen() -> bool:
        return operator.followers.seen(key) is not None

    return is_seen


async def _generations(api: Api, namespace: str) -> dict[str, int]:
    found = {}
    for kind in (DEPLOYMENT, STATEFUL_SET, JOB, SERVICE):
        for item in (await api.list(kind, namespace))["items"]:
            found[f"{kind.kind} {item['metadata']['name']}"] = item["metadata"].get("generation", 0)
    return found


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
    monkeypatch.setattr(reconciler_module, "AUDITING_SECONDS", 1.0)
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


async def test_a_finished_experiment_goes_when_its_time_is_over(api: Api, namespace: str, kubelet: Kubelet) -> None:
    services = Services()
    document = experiment_object("eight", namespace, activeDeadlineSeconds=1, ttlSecondsAfterFinished=1)
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")

        async def is_deleted() -> bool:
            return await api.get(EXPERIMENT, namespace, "eight") is None

        await eventually(is_deleted)


async def test_the_keys_of_a_deleted_experiment_get_an_end(api: Api, namespace: str, kubelet: Kubelet) -> None:
    services, document = Services(), experiment_object("nine", namespace)
    with running_redis() as url:
        async with (
            services.serving(document),
            operating(api, namespace, services, redis_url=url),
            aclosing(await connect_redis(url)) as redis,
        ):
            made = await api.apply(document, manager="test")
            await until_phase(api, namespace, "nine", "Starting")
            ledger = f"{namespace}.nine.{made['metadata']['uid'][:8]}"
            await redis.set(f"{key_prefix(ledger, 'default')}x", "1")
            await redis.set(f"{key_prefix('other', 'default')}x", "1")
            await api.delete(EXPERIMENT, namespace, "nine")

            async def ends() -> bool:
                return int(await redis.ttl(f"{key_prefix(ledger, 'default')}x")) > 0

            await eventually(ends)
            assert await redis.ttl(f"{key_prefix('other', 'default')}x") == -1


async def test_what_has_been_made_again_is_not_deleted_for_what_it_was(api: Api, namespace: str) -> None:
    metadata = {"name": "again", "namespace": namespace}
    made = await api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    with pytest.raises(ApiError, match="UID"):
        await api.delete(CONFIG_MAP, namespace, "again", "another")
    assert await api.delete(CONFIG_MAP, namespace, "again", made["metadata"]["uid"])
    assert not await api.delete(CONFIG_MAP, namespace, "again", made["metadata"]["uid"])
