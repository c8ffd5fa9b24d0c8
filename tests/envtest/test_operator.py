"""The life of experiments with an operator and a real API server; the kubelet is played, the controllers are real."""

from contextlib import aclosing
from typing import Any

from nexrl.k8s.api import (
    CLAIM,
    DEPLOYMENT,
    EVENT,
    EXPERIMENT,
    JOB,
    POD,
    SERVICE,
    STATEFUL_SET,
    Api,
)
from nexrl.store import connect_redis, key_prefix
from nexrl_operator.api_objects import is_ready
from nexrl_operator.server import Operator
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import collect_garbage, condition, operating, run, until_condition, until_gone, until_phase
from tests.support.patience import eventually
from tests.support.redis import running_redis

Object = dict[str, Any]


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
    events = (await api.list(EVENT, namespace))["items"]
    assert {"Starting", "Running", "Succeeded", "CreatedJob"} <= {event["reason"] for event in events}
    assert all(event["lastTimestamp"] for event in events)  # by which `kubectl get events` sorts


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
            made = [event for event in events if event["involvedObject"].get("uid") == second["metadata"]["uid"]]
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


async def test_a_trainer_of_two_pods_of_which_one_fails_is_followed_by_one_next_attempt_with_both(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("pair", namespace, trainer={"steps": 4, "replicas": 2})
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        await until_trainers(api, namespace, {"replicas": 2, "readyReplicas": 2})
        await kubelet.end("pair-trainer-1-0", 6, "replica 1 of the trainer has ended or cannot be reached")
        await kubelet.fail("pair-trainer-1-1", 137, "killed")

        async def is_second() -> bool:
            return await api.get(JOB, namespace, "pair-trainer-2") is not None

        await eventually(is_second)
        assert {name: record.restarts for name, record in controller.state.exits.items()} == {"trainer-0": 1}
        assert "SIGKILL" in controller.state.message
        await controller.heartbeat(_trainer("trainer-0"), [])
        await until_trainers(api, namespace, {"replicas": 2, "readyReplicas": 2})
        await until_phase(api, namespace, "pair", "Running")


async def until_trainers(api: Api, namespace: str, expected: dict[str, int]) -> None:
    """Wait until the status of the experiment 'pair' says this of its trainer."""

    async def is_shown() -> bool:
        found = await api.get(EXPERIMENT, namespace, "pair")
        return found is not None and found.get("status", {}).get("trainer") == expected

    await eventually(is_shown)


async def test_a_trainer_whose_pod_is_evicted_or_deleted_uses_up_no_restart(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services = Services()
    document = experiment_object("six", namespace, failurePolicy={"maxRestarts": 0})
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        await kubelet.fail("six-trainer-1-0", 143, "evicted", is_evicted=True)
        await _until_ready(api, namespace, "six-trainer-2-0")
        await kubelet.fail_job("six-trainer-2")
        await api.delete(POD, namespace, "six-trainer-2-0")
        await _until_ready(api, namespace, "six-trainer-3-0")
        assert controller.state.exits == {}
        await kubelet.fail("six-trainer-3-0", 1, "broken")
        await until_phase(api, namespace, "six", "Failed")


async def _until_ready(api: Api, namespace: str, pod_name: str) -> None:
    async def is_there() -> bool:
        pod = await api.get(POD, namespace, pod_name)
        return pod is not None and is_ready(pod)

    await eventually(is_there)


def _trainer(name: str = "trainer") -> Any:
    from nexrl_controller.activity import Module

    return Module(name, "trainer")


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
        return operator.clients.seen(key) is not None

    return is_seen


async def _generations(api: Api, namespace: str) -> dict[str, int]:
    found = {}
    for kind in (DEPLOYMENT, STATEFUL_SET, JOB, SERVICE):
        for item in (await api.list(kind, namespace))["items"]:
            found[f"{kind.kind} {item['metadata']['name']}"] = item["metadata"].get("generation", 0)
    return found


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
