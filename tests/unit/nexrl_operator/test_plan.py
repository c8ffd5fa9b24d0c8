"""Plan and status: pure functions of what was observed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from nexrl.spec.marks import may_change
from nexrl.spec.schema import schema_view
from nexrl.spec.section import LIVE
from nexrl_operator.api_objects import attempt_of, rfc3339
from nexrl_operator.network_policy import network_policy
from nexrl_operator.observed import Observed, Seen
from nexrl_operator.plan import Plan, Stage, make_plan
from nexrl_operator.revisions import REVISION, template_revision
from nexrl_operator.status import Verdict, new_status, rejected
from tests.support.kubelet import experiment_object, operator_settings
from tests.support.observed import ALL, NOW, RUNNING, condition, observed, pod, renderer

Object = dict[str, Any]


def names(items: Sequence[Object]) -> set[str]:
    return {f"{item['kind']} {item['metadata']['name']}" for item in items}


def test_an_experiment_that_is_stalled_is_not_ready() -> None:
    made = renderer()
    stalled = replace(RUNNING, reason="Stalled", message="no step for 90 s; blocked at trainer -> rollout")
    status = new_status(observed(made, seen=stalled), made, Verdict())
    assert (condition(status, "Ready")["status"], condition(status, "Ready")["reason"]) == ("False", "Stalled")
    assert condition(new_status(observed(made), made, Verdict()), "Ready")["status"] == "True"


def test_of_an_experiment_that_has_ended_the_condition_ready_says_why() -> None:
    made = renderer()
    ended = replace(RUNNING, phase="Failed", reason="ComponentFailed", message="trainer ended")
    failed = new_status(observed(made, running=(), seen=ended), made, Verdict())
    after = new_status(observed(made, running=(), seen=None, **failed), made, Verdict())
    ready = condition(after, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ComponentFailed")
    assert ready["message"].startswith("trainer ended\nTo start it again from its newest checkpoint, ")


@pytest.mark.guide("R2")
def test_a_new_experiment_gets_all_its_objects() -> None:
    made = renderer()
    empty = Observed({"metadata": {"name": "x", "namespace": "rl", "uid": "u"}}, [], [], None, NOW)
    plan = make_plan(empty, made)
    assert plan.stage is Stage.RUN
    assert {
        "ConfigMap x-experiment",
        "PersistentVolumeClaim x-run",
        "Job x-trainer-1",
        "StatefulSet x-rollout",
    } <= names(plan.apply)
    assert new_status(empty, made, Verdict())["phase"] == "Pending"


def test_pods_call_each_other_and_what_release_and_spec_name_and_nobody_else() -> None:
    made = renderer(redis={"url": "rediss://ours.example:6380"})
    redis = {"ports": [{"port": 6379, "protocol": "TCP"}]}
    policy = network_policy(made.owner, made.experiment.spec, operator_settings(egress=[redis]))
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    own, names, *others = policy["spec"]["egress"]
    assert own == {"to": [{"podSelector": {"matchLabels": {"nexrl.dev/experiment": "x"}}}]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert others == [redis, {"ports": [{"port": 6380, "protocol": "TCP"}]}]
    without = replace(made, settings=operator_settings(network_policy=False))
    assert "NetworkPolicy" not in {item["kind"] for item in without.foundation()}


def test_the_nodes_of_the_trainer_stay_known_when_it_is_gone() -> None:
    spec = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    made = renderer(trainer={"steps": 4, "template": {"spec": spec}})
    results = new_status(observed(made), made, Verdict())["results"]
    assert spec.items() <= results.items()
    after = observed(made, running=(), seen=None, results=results)
    assert new_status(after, made, Verdict())["results"] == results


def test_the_count_at_the_end_cannot_be_asked_for_before_it() -> None:
    made = renderer()
    now = observed(made)
    asked = {"metadata": {**now.resource["metadata"], "annotations": {"nexrl.dev/audit": "final"}}}
    assert make_plan(replace(now, resource=now.resource | asked), made).audit == ""


def test_it_waits_until_nothing_is_left_of_a_deleted_experiment_of_its_name() -> None:
    made = renderer()
    resource = {"metadata": {"name": "x", "namespace": "rl", "uid": "u"}}
    plan = make_plan(Observed(resource, [], [], None, NOW, has_predecessor=True), made)
    assert not plan.apply
    assert plan.requeue_after_seconds


def test_nothing_is_done_where_nothing_is_missing() -> None:
    made = renderer()
    plan = replace(make_plan(observed(made), made), compare=())
    assert plan == Plan(Stage.RUN, apply=[], scale=[], exits=[], requeue_after_seconds=7100)  # the startup deadline


def test_what_somebody_has_deleted_comes_back_when_its_pods_have_ended() -> None:
    made = renderer()
    seen = observed(made)
    seen = replace(seen, children=[child for child in seen.children if child["metadata"]["name"] != "x-trainer-1"])
    plan = make_plan(seen, made)
    assert not [item for item in plan.apply if item["kind"] == "Job"]  # two trainers would write to one volume
    assert plan.requeue_after_seconds
    others = [pod for pod in seen.pods if pod["metadata"]["name"] != "x-trainer-0"]
    assert "Job x-trainer-1" in names(make_plan(replace(seen, pods=others), made).apply)


def test_an_operator_that_has_not_heard_of_the_controller_makes_nothing_again() -> None:
    made = renderer()
    left = ("controller", "trajectory-pool")  # the others have been stopped, as the experiment ends
    assert not make_plan(observed(made, running=left, seen=None), made).apply
    assert make_plan(observed(made, running=("trajectory-pool",), seen=None), made).apply  # it was never all there


def test_only_the_number_of_rollouts_is_written_when_it_changes() -> None:
    now = observed(renderer())
    [(item, replicas)] = make_plan(now, renderer(rollout={"maxNewTokens": 8, "replicas": 4})).scale
    assert (item["metadata"]["name"], replicas) == ("x-rollout", 4)


def test_a_template_of_rollouts_is_rolled_out_and_one_of_the_trainer_waits() -> None:
    template = {"spec": {"nodeSelector": {"a": "b"}}}
    rolling = make_plan(observed(renderer()), renderer(rollout={"maxNewTokens": 8, "template": template}))
    assert names(rolling.apply) == {"ConfigMap x-experiment", "StatefulSet x-rollout"}
    waiting = make_plan(observed(renderer()), renderer(trainer={"steps": 4, "template": template}))
    assert names(waiting.apply) == {"ConfigMap x-experiment"}
    assert "trainer" in waiting.pending_change


def test_a_change_that_slipped_through_waits_for_a_suspension() -> None:
    made = renderer(trainer={"steps": 5})
    now = observed(renderer())
    plan = make_plan(now, made)
    assert not plan.apply
    status = new_status(now, made, Verdict(pending_change=plan.pending_change))
    assert condition(status, "SpecChangePending")["status"] == "True"


def test_components_stop_each_before_what_it_needs() -> None:
    made = renderer(suspend=True)
    order = [("rollout", "trainer"), ("inference", "weight-sync"), ("trajectory-pool",), ("controller",)]
    left: tuple[str, ...] = ALL
    for wave in order:
        plan = make_plan(observed(made, running=left), made)
        assert names(plan.delete) == names([made.workloads(1)[name] for name in wave])
        left = tuple(name for name in left if name not in wave)
    assert not make_plan(observed(made, running=()), made).delete


def test_the_next_ones_stop_only_when_the_first_have() -> None:
    made = renderer(suspend=True)
    now = observed(made)
    gone = [child for child in now.children if child["metadata"]["name"] not in ("x-rollout", "x-trainer-1")]
    assert not make_plan(replace(now, children=gone), made).delete  # their pods still write a checkpoint


def test_the_ledger_is_counted_before_the_pool_stops() -> None:
    made, ending = renderer(), Seen("Stopping", "Completed", "", 9, 9, 9)
    now = observed(made, running=("controller", "trajectory-pool"), seen=ending)
    plan = make_plan(now, made)
    assert (plan.stage, plan.audit, plan.delete) == (Stage.END, "final", [])
    counted = observed(
        made, running=("controller", "trajectory-pool"), seen=ending, audit={"request": "final", "findings": 0}
    )
    assert names(make_plan(counted, made).delete) == {"Deployment x-trajectory-pool"}


def test_what_failed_by_a_deadline_is_counted_too() -> None:
    made = renderer()
    failed = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": ""}]
    stopping = observed(made, running=("trainer", "trajectory-pool", "controller"), conditions=failed)
    assert not make_plan(stopping, made).audit
    quiet = observed(made, running=("trajectory-pool", "controller"), conditions=failed)
    plan = make_plan(quiet, made)
    assert (plan.stage, plan.audit, plan.delete) == (Stage.CLEAR, "final", [])


def test_the_controller_stays_until_the_status_says_how_it_ended() -> None:
    made, ended = renderer(), Seen("Succeeded", "Completed", "all 9 steps were made", 9, 9, 9)
    now = observed(made, running=("controller",), seen=ended)
    assert not make_plan(now, made).delete
    status = new_status(now, made, Verdict())
    assert status["phase"] == "Succeeded"
    over = replace(now, resource={**now.resource, "status": status})
    assert names(make_plan(over, made).delete) == {"Deployment x-controller"}
    assert condition(new_status(over, made, Verdict()), "Complete")["reason"] == "Completed"


@pytest.mark.parametrize(
    ("limits", "running", "before", "reason"),
    [
        ({"activeDeadlineSeconds": 100}, ALL, {}, "DeadlineExceeded"),
        ({"activeDeadlineSeconds": 101}, ALL, {}, None),
        ({"startupDeadlineSeconds": 100}, ("controller",), {}, "StartupDeadlineExceeded"),  # resumed, but no trainer
        ({"startupDeadlineSeconds": 101}, ALL, {}, None),
        ({"startupDeadlineSeconds": 100}, ("controller",), {"trainingTime": rfc3339(NOW - 50)}, None),  # it was evicted
    ],
)
def test_deadlines_count_from_the_start(
    limits: Object, running: tuple[str, ...], before: Object, reason: str | None
) -> None:
    made = renderer(**limits)
    plan = make_plan(observed(made, running=running, **before), made)
    assert (plan.failed[0] if plan.failed else None) == reason
    if reason is None and "activeDeadlineSeconds" in limits:
        assert plan.requeue_after_seconds == 1


def test_a_deadline_is_not_missed_while_pods_of_a_predecessor_stop() -> None:
    made = renderer(activeDeadlineSeconds=101)
    stopping = replace(observed(made, running=()), pods=[pod(made, "trainer")])
    assert make_plan(stopping, made).requeue_after_seconds == 1
    assert make_plan(stopping, renderer(activeDeadlineSeconds=200)).requeue_after_seconds == 2


def test_the_time_of_training_is_when_it_ran_first_since_the_last_pause() -> None:
    made = renderer()
    resumed = new_status(observed(made, running=("controller",)), made, Verdict())
    assert (resumed["phase"], "trainingTime" in resumed) == ("Starting", False)
    trained = new_status(observed(made, **resumed), made, Verdict())
    assert (trained["phase"], trained["trainingTime"]) == ("Running", rfc3339(NOW))
    evicted = replace(observed(made, running=("controller",), **trained), now=NOW + 9)
    assert new_status(evicted, made, Verdict())["trainingTime"] == rfc3339(NOW)
    paused = renderer(suspend=True)
    assert "trainingTime" not in new_status(observed(paused, running=(), **trained), paused, Verdict())


def test_an_operator_that_has_just_started_says_nothing_else_than_the_one_before() -> None:
    made = renderer()
    before = new_status(observed(made), made, Verdict())
    deaf = new_status(observed(made, seen=None, **before), made, Verdict())
    assert (deaf["phase"], deaf["trainingTime"]) == ("Running", before["trainingTime"])


def test_a_finished_experiment_is_deleted_when_its_time_is_over() -> None:
    made = renderer(ttlSecondsAfterFinished=60)
    over = [{"type": "Complete", "status": "True", "reason": "Completed", "message": "", "lastTransitionTime": ""}]
    early = observed(made, running=(), conditions=over, completionTime=rfc3339(NOW - 50))
    assert make_plan(early, made).requeue_after_seconds == 10
    late = observed(made, running=(), conditions=over, completionTime=rfc3339(NOW - 60))
    assert make_plan(late, made).delete == [late.resource]


@pytest.mark.parametrize("path", may_change(LIVE))
def test_a_field_marked_live_changes_what_the_operator_does_with_a_running_or_ended_experiment(path: str) -> None:
    """Pods read their configuration when they start, so only the operator sees a live change."""
    *sections, key = path.split(".")
    spec = experiment_object("x", "rl")["spec"]
    is_boolean = schema_view().at(["spec", *sections, key], {})["type"] == "boolean"
    reduce(lambda section, name: section[name], sections, spec)[key] = is_boolean or 60
    before, after = renderer(), renderer(**spec)
    ended = [{"type": "Complete", "status": "True", "reason": "Completed", "message": "", "lastTransitionTime": ""}]
    states = (observed(before), observed(before, running=(), conditions=ended, completionTime=rfc3339(NOW)))
    assert any(make_plan(state, before) != make_plan(state, after) for state in states)


def test_an_ended_container_is_reported_and_a_drained_node_is_nobodys_failure() -> None:
    made = renderer()
    now = observed(made)
    ended = {"exitCode": 137, "finishedAt": "2026-11-22T00:00:00Z", "message": "last words\n", "reason": "OOMKilled"}
    failed = pod(made, "weight-sync", containerStatuses=[{"name": "nexrl", "lastState": {"terminated": ended}}])
    [report] = make_plan(replace(now, pods=[failed]), made).exits
    assert (report.component, report.exit_code) == ("x-weight-sync-0", -9)
    assert report.log_tail.startswith("last words\nOOMKilled: the node had no memory left")
    [job] = now.workloads("trainer")
    drained = pod(made, "trainer", conditions=[{"type": "DisruptionTarget", "status": "True"}])
    told = new_status(replace(now, pods=[drained]), made, Verdict())
    assert told["disruptedAttempt"] == 1
    assert observed(made, **told).is_disrupted(job)  # by another operator, when the pod is gone
    assert now.job_exit(job).exit_code == -9


@pytest.mark.guide("S6")
def test_the_status_names_what_keeps_a_pod_from_running() -> None:
    made = renderer()
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    now = observed(made, running=("controller",), seen=None)
    stuck = pod(made, "trainer", phase="Pending", conditions=conditions)
    ready = condition(new_status(replace(now, pods=[*now.pods, stuck]), made, Verdict()), "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Unschedulable")
    assert "nvidia.com/gpu" in ready["message"]


def test_the_status_says_when_the_pods_of_a_component_are_not_even_made() -> None:
    made = renderer()
    now = observed(made)
    late = pod(made, "rollout", conditions=[])
    others = [each for each in now.pods if each["metadata"]["name"] not in ("x-trainer-0", "x-rollout-0")]
    message = condition(new_status(replace(now, pods=[*others, late]), made, Verdict()), "Ready")["message"]
    assert message.startswith("waiting for trainer 0/1, rollout 0/1; no pod yet of trainer")


def test_a_controller_that_cannot_run_leaves_its_last_words_in_the_status() -> None:
    made = renderer(failurePolicy={"maxRestarts": 2})
    ended: dict[str, Any] = {"exitCode": 6, "reason": "Error", "message": "redis.url: nobody answers"}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    container = {"name": "nexrl", "restartCount": 2, "lastState": {"terminated": ended}, "state": {"waiting": waiting}}
    now = observed(made, running=("controller",), seen=None)
    now = replace(now, pods=[pod(made, "controller", conditions=[], containerStatuses=[container])])
    ready = condition(new_status(now, made, Verdict()), "Ready")
    assert ready["reason"] == "CrashLoopBackOff"
    assert ready["message"].endswith("keeps ending, the last time with exit code 6: redis.url: nobody answers")
    assert make_plan(now, made).failed is None
    container["restartCount"] = 3
    assert make_plan(now, made).failed is None  # Redis may come
    ended["exitCode"] = 2
    assert make_plan(now, made).failed == (
        "RestartsExhausted",
        "the controller ended 3 times, the last time with exit code 2: redis.url: nobody answers. "
        "Last lines of its log:\n"
        "redis.url: nobody answers",
    )


def test_progress_is_written_every_ten_seconds_and_conditions_keep_their_time() -> None:
    made = renderer()
    first = new_status(observed(made), made, Verdict())
    assert first["phase"] == "Running"
    assert first["progress"]["reward"] == "0.5"
    later = replace(observed(made, seen=replace(RUNNING, step=4), **first), now=NOW + 9)
    assert new_status(later, made, Verdict())["progress"]["step"] == 3
    assert new_status(replace(later, now=NOW + 10), made, Verdict())["progress"]["step"] == 4
    unchanged = replace(observed(made, **first), now=NOW + 60)
    assert new_status(unchanged, made, Verdict()) == first  # nothing to write


def test_samples_that_fail_are_a_condition_while_they_fail() -> None:
    made = renderer()
    told = "100 % of the last 300 attempts at samples failed"
    now = observed(made, seen=replace(RUNNING, failing_samples=told))
    status = new_status(now, made, Verdict())
    failing = condition(status, "SamplesFailing")
    assert (failing["status"], failing["reason"], failing["message"]) == ("True", "AttemptsFailed", told)
    unheard = new_status(observed(made, seen=None, **status), made, Verdict())
    assert condition(unheard, "SamplesFailing") == failing
    well = new_status(observed(made, **status), made, Verdict())
    assert "SamplesFailing" not in {each["type"] for each in well["conditions"]}


def test_a_spec_that_is_invalid_loses_nothing_of_the_status() -> None:
    made = renderer()
    running = new_status(observed(made), made, Verdict())
    status = rejected(observed(made, **running), "InvalidSpec", "no")
    assert condition(status, "Accepted")["reason"] == "InvalidSpec"
    kept = ("phase", "restarts", "trainerAttempt", "progress", "startTime", "rollout")
    assert {key: status[key] for key in kept} == {key: running[key] for key in kept}
    assert {each["type"] for each in status["conditions"]} >= {each["type"] for each in running["conditions"]}
    ended = Seen("Succeeded", "Completed", "all 9 steps were made", 9, 9, 9)
    over = new_status(observed(made, running=("controller",), seen=ended), made, Verdict())
    finished = observed(made, running=(), **over)
    assert rejected(finished, "InvalidSpec", "no") == finished.status
    assert rejected(Observed({"metadata": {}}, [], [], None, NOW), "a", "b")["phase"] == "Pending"


def test_a_label_of_somebody_else_is_no_attempt() -> None:
    assert attempt_of({"metadata": {"labels": {"nexrl.dev/attempt": "first"}}}) == 0


def test_revisions_are_on_what_is_rendered() -> None:
    made = renderer()
    assert made.workloads(1)["rollout"]["metadata"]["annotations"][REVISION] == template_revision(
        made.experiment, "rollout"
    )
