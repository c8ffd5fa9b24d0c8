"""Which failures count, and how an experiment that has failed is resumed."""

from dataclasses import replace
from typing import Any

import pytest

from nexrl_operator.api_objects import instances_of
from nexrl_operator.children import Renderer
from nexrl_operator.objects import ATTEMPT_LABEL
from nexrl_operator.observed import Observed
from nexrl_operator.plan import Stage, make_plan
from nexrl_operator.setbacks import MAX_DISRUPTIONS, setbacks
from nexrl_operator.status import Verdict, new_status
from tests.support.observed import RUNNING, Object, condition, observed, pod, renderer


def test_a_failed_experiment_that_is_suspended_can_be_resumed_and_one_that_has_succeeded_cannot() -> None:
    made, paused = renderer(), renderer(suspend=True)
    ended = replace(RUNNING, phase="Failed", reason="ComponentFailed", message="trainer ended")
    failed = new_status(observed(made, running=("controller",), seen=ended), made, Verdict(audit={"request": "final"}))
    assert (failed["phase"], failed["audit"]) == ("Failed", {"request": "final"})
    # The controller of the failed run is still there and says that it has failed.
    stopping = observed(paused, running=("controller",), seen=ended, **failed)
    assert make_plan(stopping, paused).stage is Stage.PAUSE
    assert new_status(stopping, paused, Verdict())["phase"] == "Suspending"
    status = new_status(observed(paused, running=(), seen=None, **failed), paused, Verdict())
    assert (status["phase"], "audit" in status) == ("Suspended", False)
    assert "Failed" not in {each["type"] for each in status["conditions"]}
    assert make_plan(observed(made, running=(), seen=None, **status), made).stage is Stage.RUN
    succeeded = {"conditions": [{"type": "Complete", "status": "True", "reason": "Completed", "message": ""}]}
    assert make_plan(observed(paused, running=(), seen=None, **succeeded), paused).stage is Stage.CLEAR


def test_a_trainer_whose_pod_was_evicted_preempted_or_deleted_has_not_failed() -> None:
    made = renderer()
    now = observed(made)
    [job] = now.workloads("trainer")
    failed = pod(made, "trainer", phase="Failed", conditions=[])
    evicted = pod(made, "trainer", conditions=[{"type": "DisruptionTarget", "status": "True"}])
    deleted = pod(made, "trainer")
    deleted["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    for pods, is_disrupted in (([failed], False), ([evicted], True), ([deleted], True), ([], True)):
        assert replace(now, pods=pods).is_disrupted(job) == is_disrupted
    complete = {**job, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    assert not replace(now, pods=[]).is_disrupted(complete)


def test_pods_of_other_components_that_are_evicted_or_replaced_are_no_exits() -> None:
    made = renderer()
    ended = {"exitCode": 137, "finishedAt": "2026-11-22T00:00:00Z", "reason": "Evicted"}
    container = {"name": "nexrl", "state": {"terminated": ended}}
    disruption = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
    evicted = pod(made, "rollout", phase="Failed", conditions=disruption, containerStatuses=[container])
    deleted = pod(made, "rollout", containerStatuses=[{"name": "nexrl", "lastState": {"terminated": ended}}])
    deleted["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    assert make_plan(replace(observed(made), pods=[evicted, deleted]), made).exits == []


def test_the_end_of_a_data_reader_is_an_exit_of_its_own_and_its_pool_lives() -> None:
    made = renderer()
    ended = {"exitCode": 2, "finishedAt": "2026-11-22T00:00:00Z", "message": "spec.data.factory: raised"}
    reader = {"name": "data-reader", "lastState": {"terminated": ended}}
    status = [{"name": "nexrl", "state": {"running": {}}}, reader]
    one, of_two = pod(made, "trajectory-pool", containerStatuses=status), pod(made, "trajectory-pool")
    one["spec"] = made.workloads(1)["trajectory-pool"]["spec"]["template"]["spec"]
    assert instances_of(one) == ["trajectory-pool", "data-reader"]
    [told] = make_plan(replace(observed(made), pods=[one]), made).exits
    assert (told.component, told.exit_code, told.log_tail) == ("data-reader", 2, "spec.data.factory: raised")
    two = renderer(trajectoryPool={"replicas": 2})
    of_two["spec"] = two.workloads(1)["trajectory-pool"]["spec"]["template"]["spec"]
    assert instances_of(of_two) == ["x-trajectory-pool-0", "x-trajectory-pool-0-data-reader"]


def test_an_eviction_for_the_disk_that_a_pod_uses_itself_is_its_fault() -> None:
    made = renderer()
    now, message = observed(made), 'Usage of EmptyDir volume "tmp" exceeds the limit "32Gi". '
    [job] = now.workloads("trainer")
    before = {"name": "nexrl", "lastState": {"terminated": {"exitCode": 1, "finishedAt": "2026-11-22T00:00:00Z"}}}
    own = {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": []}
    rollout = pod(made, "rollout", **own, containerStatuses=[before])  # reported before: each instance has one newest
    trainer = pod(made, "trainer", **own)
    pressed = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
    drained = pod(made, "inference", **(own | {"conditions": pressed}))
    now = replace(now, pods=[rollout, trainer, drained])
    [exit] = make_plan(now, made).exits
    assert (exit.component, exit.exit_code) == ("x-rollout-0", -9)
    assert exit.log_tail.startswith('evicted: Usage of EmptyDir volume "tmp" exceeds the limit "32Gi".; write less, or')
    assert exit.log_tail.endswith("raise the sizeLimit of the volume in spec.rollout.template.spec.volumes")
    assert not now.is_disrupted(job)
    assert (now.job_exit(job).exit_code, "spec.trainer.template" in now.job_exit(job).log_tail) == (-9, True)


@pytest.mark.parametrize(
    ("message", "instance", "remedy"),
    [
        (
            'Usage of EmptyDir volume "data-reader-tmp" exceeds the limit "32Gi". ',
            "data-reader",
            "container data-reader: write less, or raise the sizeLimit of the volume in spec.trajectoryPool.template",
        ),
        (
            'Container data-reader exceeded its local ephemeral storage limit "1Gi". ',
            "data-reader",
            "raise limits.ephemeral-storage in spec.trajectoryPool.template.spec.containers[data-reader].resources",
        ),
        (
            'Usage of EmptyDir volume "tmp" exceeds the limit "4Gi". ',
            "trajectory-pool",
            "write less, or raise the sizeLimit of the volume in spec.trajectoryPool.template.spec.volumes",
        ),
        (
            "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. ",
            "trajectory-pool",
            "raise limits.ephemeral-storage in spec.trajectoryPool.template.spec.containers[nexrl].resources",
        ),
    ],
)
def test_a_pool_that_is_evicted_for_the_disk_of_one_container_is_an_exit_of_that_container_once(
    message: str, instance: str, remedy: str
) -> None:
    made = renderer()
    ended = {"exitCode": 1, "finishedAt": "2026-11-22T00:00:00Z"}
    before = [{"name": name, "lastState": {"terminated": ended}} for name in ("nexrl", "data-reader")]
    first, second = (pod(made, "trajectory-pool", phase="Failed", reason="Evicted", message=message) for _ in "ab")
    first["metadata"] |= {"uid": "a", "creationTimestamp": "2026-11-22T00:00:00Z"}
    second["metadata"] |= {"uid": "b", "creationTimestamp": "2026-11-22T00:01:00Z"}
    for each in (first, second):
        each["spec"] = made.workloads(1)["trajectory-pool"]["spec"]["template"]["spec"]
        each["status"] |= {"conditions": [], "containerStatuses": before}
    exits = {each.component: each for each in make_plan(replace(observed(made), pods=[second, first]), made).exits}
    assert len(exits) == 2  # of each container only the newest, however many evicted pods the Deployment has
    assert (exits[instance].request_id, exits[instance].exit_code) == ("b/evicted", -9)
    assert message.strip() in exits[instance].log_tail
    assert remedy in exits[instance].log_tail
    [other] = exits.keys() - {instance}
    assert exits[other].request_id == "b/2026-11-22T00:00:00Z"


@pytest.mark.parametrize(
    ("exit_code", "restarts", "rules", "is_failed"),
    [
        (1, 2, [], False),
        (1, 3, [], True),
        (6, 9, [], False),
        (2, 1, [], True),
        (1, 9, [{"exitCodes": [1], "action": "Ignore", "components": ["controller"]}], False),
        (137, 1, [{"exitCodes": [-9], "action": "Fail"}], True),
        (137, 1, [{"exitCodes": [-9], "action": "Fail", "components": ["trainer"]}], False),
    ],
)
def test_exits_of_the_controller_follow_the_failure_policy(
    exit_code: int, restarts: int, rules: list[dict[str, Any]], is_failed: bool
) -> None:
    made = renderer(failurePolicy={"maxRestarts": 2, "rules": rules})
    ended = {"exitCode": exit_code, "finishedAt": "2026-11-22T00:00:00Z", "message": "last words"}
    container = {"name": "nexrl", "restartCount": restarts, "lastState": {"terminated": ended}}
    now = replace(observed(made), pods=[pod(made, "controller", containerStatuses=[container])])
    assert (make_plan(now, made).failed is not None) == is_failed


def ended_controller(made: Renderer, exit_code: int, ends: int, *, step: int = 0, **status: Any) -> Observed:
    """Return an experiment whose controller has ended this often, the last time with this code."""
    ended = {"exitCode": exit_code, "finishedAt": "2026-11-22T00:00:00Z", "message": "last words"}
    container = {"name": "nexrl", "restartCount": ends, "lastState": {"terminated": ended}}
    seen = replace(RUNNING, step=step)
    return replace(observed(made, seen=seen, **status), pods=[pod(made, "controller", containerStatuses=[container])])


def test_ends_of_the_controller_count_since_the_newest_step_and_without_those_for_lack_of_redis() -> None:
    made = renderer(failurePolicy={"maxRestarts": 2})
    status: dict[str, Any] = {}
    for restarts, (exit_code, step, counted) in enumerate(
        [(6, 0, 0), (1, 0, 1), (6, 0, 1), (6, 0, 1), (1, 0, 2), (1, 5, 1), (1, 5, 2), (6, 5, 2)], start=1
    ):
        now = ended_controller(made, exit_code, restarts, step=step, **status)
        assert make_plan(now, made).failed is None
        status = new_status(now, made, Verdict())
        assert status["setbacks"]["controllerEnds"] == counted
        seen_again = ended_controller(made, exit_code, restarts, step=step + 100, **status)
        assert new_status(seen_again, made, Verdict())["setbacks"] == status["setbacks"]  # a step alone changes nothing
    failed = make_plan(ended_controller(made, 1, 9, step=5, **status), made).failed
    assert failed is not None
    assert failed[1].startswith(
        "the controller ended 3 times without a new step, the last time with exit code 1: last words."
    )


def test_a_new_pod_of_the_controller_begins_at_no_restarts_and_a_resumed_experiment_with_all() -> None:
    made, paused = renderer(failurePolicy={"maxRestarts": 2}), renderer(suspend=True)
    status = new_status(ended_controller(made, 1, 2), made, Verdict())
    now = ended_controller(made, 1, 1, **status)
    now.pods[0]["metadata"]["uid"] = "another"
    assert new_status(now, made, Verdict())["setbacks"]["controllerEnds"] == 3
    assert "setbacks" not in new_status(observed(paused, **status), paused, Verdict())


def disrupted(made: Renderer, attempt: int, step: int, **status: Any) -> Observed:
    """Return an experiment whose trainer Job of this number has lost its pod."""
    now = observed(made, seen=replace(RUNNING, step=step), **status)
    [job] = now.workloads("trainer")
    job["metadata"]["labels"][ATTEMPT_LABEL] = str(attempt)
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    return replace(now, pods=[])


def test_disruptions_without_a_new_step_are_counted_and_end_the_experiment_at_a_limit() -> None:
    made = renderer()
    status: dict[str, Any] = {}
    for attempt in range(1, MAX_DISRUPTIONS + 1):
        now = disrupted(made, attempt, 7, **status)
        assert setbacks(now, made.experiment.spec.failure_policy).disruptions == attempt
        assert make_plan(now, made).failed is None
        status = new_status(now, made, Verdict())
    assert setbacks(disrupted(made, 101, 8, **status), made.experiment.spec.failure_policy).disruptions == 1
    failed = make_plan(disrupted(made, 101, 7, **status), made).failed
    assert failed is not None
    assert failed[1].startswith("pods of the trainer were evicted or deleted 101 times without a new step; ")


def gang_pod(
    made: Renderer, replica: int, code: int | None = None, finished: str = "", is_deleted: bool = False
) -> Object:
    """Return a pod of a trainer with several replicas; it runs if `code` is None."""
    ended = {"exitCode": code, "finishedAt": finished, "message": f"words of {replica}", "reason": "Error"}
    state = {"running": {}} if code is None else {"terminated": ended}
    made_pod = pod(made, "trainer", containerStatuses=[{"name": "nexrl", "state": state}], conditions=[])
    made_pod["metadata"] |= {"name": f"x-trainer-1-{replica}", **(DELETED_AT_11 if is_deleted else {})}
    made_pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = str(replica)
    return made_pod


AT_10, AT_11, AT_12 = (f"2026-11-22T00:00:{second}Z" for second in (10, 11, 12))
DELETED_AT_11 = {"deletionTimestamp": "2026-11-22T00:02:11Z", "deletionGracePeriodSeconds": 120}


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (((6, AT_12), (137, AT_11)), (-9, "words of 1")),  # replica 0 has only lost replica 1
        (((7, AT_12), (7, AT_11)), (7, "words of 0")),  # replica 0 knows the rank, and its reason
        (((10, AT_12), (0, AT_12)), (10, "words of 0")),
        (((6, AT_11), (6, AT_11)), (6, "words of 0")),
        (((None, ""), (7, AT_11)), (7, "words of 1")),
    ],
)
def test_a_trainer_of_several_pods_ends_once_for_the_reason_of_the_one_that_was_lost(
    ends: tuple[tuple[int | None, str], ...], expected: tuple[int, str]
) -> None:
    made = renderer(trainer={"steps": 4, "replicas": 2})
    pods = [gang_pod(made, replica, *end) for replica, end in enumerate(ends)]
    now = replace(observed(made), pods=pods[::-1])
    [job] = now.workloads("trainer")
    told = now.job_exit(job)
    assert (told.component, told.exit_code, told.log_tail) == ("trainer-0", *expected)
    assert not now.is_disrupted(job)


def test_pods_that_kubernetes_deletes_because_another_one_failed_are_not_disrupted() -> None:
    made = renderer(trainer={"steps": 4, "replicas": 2})
    now, drained = observed(made), gang_pod(made, 1, is_deleted=True)
    [job] = now.workloads("trainer")
    for other, is_disrupted in (((7, AT_10), False), ((6, AT_12), True), ((0, AT_10), True), ((None, ""), True)):
        assert replace(now, pods=[gang_pod(made, 0, *other), drained]).is_disrupted(job) == is_disrupted
    evicted = gang_pod(made, 1, 137, AT_11)
    evicted["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
    assert replace(now, pods=[gang_pod(made, 0, 6, AT_11), evicted]).is_disrupted(job)


def test_the_pods_of_a_trainer_are_named_by_their_replica() -> None:
    made = renderer(trainer={"steps": 4, "replicas": 2})
    second = gang_pod(made, 1)
    second["spec"] = made.workloads(1)["trainer"]["spec"]["template"]["spec"]
    assert instances_of(second) == ["trainer-1"]


def test_the_status_says_how_many_replicas_of_the_trainer_are_ready() -> None:
    made = renderer(trainer={"steps": 4, "replicas": 2})
    status = new_status(observed(made), made, Verdict())
    assert status["trainer"] == {"replicas": 2, "readyReplicas": 1}
    assert condition(status, "TrainerReady")["message"] == "trainer 1/2"
