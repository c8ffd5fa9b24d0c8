"""What is to be done about one experiment now: a pure function of what was seen. The reconciler does it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nexrl_controller.operator.children import BY_NAME, REVISION, Renderer
from nexrl_controller.operator.observed import (
    Exit,
    Observed,
    attempt_of,
    components_in_wave,
    has_finished,
    seconds,
)
from nexrl_controller.operator.queueing import is_admitted, is_to_be_queued_again, queue_of, requeue_at, with_pod_sets
from nexrl_controller.operator.status import is_finished

Object = dict[str, Any]

ROLLING = ("rollout", "inference")
"""Components whose pods are replaced one by one when their template changes."""
AUDIT_ANNOTATION = "nexrl.dev/audit"
"""With a value that is not that of status.audit.request: the ledger is to be counted now."""
PREDECESSOR_SECONDS = 2.0
FINAL_AUDIT = "final"
CONTROLLER_WAVE = BY_NAME["controller"].wave


class Stage(Enum):
    """What the experiment is about to do."""

    RUN = "run"
    QUEUE = "queue"
    """Its queue has not admitted it, or has put it out."""
    PAUSE = "pause"
    END = "end"
    """Its controller has decided how it ends: components stop, and the controller hears of it."""
    CLEAR = "clear"
    """It is over, and says so: nothing runs any more."""


@dataclass
class Plan:
    """What is to be done."""

    stage: Stage
    apply: list[Object] = field(default_factory=list)
    scale: list[tuple[Object, int]] = field(default_factory=list)
    """Workloads of which only the number of pods is wrong."""
    delete: list[Object] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    """What the experiment's controller should hear of."""
    ended_job: Object | None = None
    """The trainer's Job, which has ended: the controller says whether another is made."""
    audit: str = ""
    """The request that a count of the ledger answers; "" when none is wanted."""
    failed: tuple[str, str] | None = None
    pending_change: str = ""
    again_in: float | None = None


def stage_of(observed: Observed, renderer: Renderer) -> Stage:
    """What the experiment is about to do."""
    if is_finished(observed.status):
        return Stage.CLEAR
    if renderer.experiment.spec.suspend:
        return Stage.PAUSE
    if observed.seen is not None and observed.seen.is_ending:
        return Stage.END
    return Stage.QUEUE if queue_of(observed.resource) and not is_admitted(observed.admission) else Stage.RUN


def make_plan(observed: Observed, renderer: Renderer) -> Plan:
    """What is to be done now."""
    plan = Plan(stage_of(observed, renderer))
    match plan.stage:
        case Stage.RUN:
            _run(plan, observed, renderer)
        case Stage.END:
            plan.audit = FINAL_AUDIT if _may_audit(observed) else ""
            _stop(plan, observed, CONTROLLER_WAVE - 1)
        case Stage.QUEUE:
            _stop(plan, observed, CONTROLLER_WAVE)
            _queue(plan, observed, renderer)
        case Stage.PAUSE:
            _stop(plan, observed, CONTROLLER_WAVE)
            _free_quota(plan, observed)
        case Stage.CLEAR:  # what failed by a deadline comes here without an END
            plan.audit = FINAL_AUDIT if _may_audit(observed) else ""
            _stop(plan, observed, CONTROLLER_WAVE)
            _free_quota(plan, observed)
            _expire(plan, observed, renderer)
    return plan


def next_attempt(observed: Observed) -> int:
    """The number of the trainer's next Job; never one that was used."""
    known = [attempt_of(job) for job in observed.children if job["kind"] == "Job"]
    return max([int(observed.status.get("trainerAttempt", 0)), *known]) + 1


def _run(plan: Plan, observed: Observed, renderer: Renderer) -> None:
    plan.failed = _failure(observed, renderer)
    if plan.failed is not None:
        return
    plan.again_in = _next_deadline(observed, renderer)
    plan.exits = list(observed.exits())
    asked = observed.resource["metadata"].get("annotations", {}).get(AUDIT_ANNOTATION, "")
    plan.audit = asked if asked not in (_audited(observed), FINAL_AUDIT) and observed.ready("trajectory-pool") else ""
    is_on = any(observed.workloads(name) for name in BY_NAME)
    if not is_on and (observed.living(*BY_NAME) or observed.has_predecessor):
        # Pods of before a pause, or a volume with the checkpoints of another: wait until they are gone.
        plan.again_in = PREDECESSOR_SECONDS
        return
    foundation = renderer.foundation()
    for item in foundation:
        # Of what runs, nothing is rendered anew: another version of this operator must not disturb it.
        if not observed.has(item) or (not is_on and item["kind"] != "PersistentVolumeClaim"):
            plan.apply.append(item)
    configuration = observed.find(foundation[0])
    if is_on and configuration is not None and _revision(configuration) != renderer.configuration_revision():
        plan.pending_change = "the spec has changed in a way that needs a restart of all pods"
    # An operator that has just started has not heard yet whether the experiment is about to end.
    is_deaf = observed.seen is None and bool(observed.workloads("controller"))
    for component, item in renderer.workloads(next_attempt(observed)).items():
        if observed.workloads(component) or not is_deaf:
            _run_component(plan, observed, component, item)


def _run_component(plan: Plan, observed: Observed, component: str, item: Object) -> None:
    found = observed.workloads(component)
    if not found and observed.living(component):
        plan.again_in = PREDECESSOR_SECONDS  # two trainers would write to one volume: what is stopping stops first
        return
    if not found:
        plan.apply.append(item)
        return
    newest = found[-1]
    if component == "trainer" and has_finished(newest) is not None:
        plan.ended_job = newest
    elif _revision(newest) != _revision(item):
        if component in ROLLING:
            plan.apply.append(item)
        else:
            plan.pending_change = f"the template of {component} has changed"
    elif component != "trainer" and newest["spec"].get("replicas") != item["spec"]["replicas"]:
        plan.scale.append((newest, item["spec"]["replicas"]))


def _revision(item: Object) -> str:
    return str(item["metadata"].get("annotations", {}).get(REVISION, ""))


def _failure(observed: Observed, renderer: Renderer) -> tuple[str, str] | None:
    """What ends the experiment, whatever its controller thinks; it may be what does not come up."""
    spec, status = renderer.experiment.spec, observed.status
    began = seconds(status.get("startTime", "")) or observed.now
    limit = spec.active_deadline_seconds
    if limit is not None and observed.now - began >= limit:
        return "DeadlineExceeded", f"it has run for {limit} s, which is spec.activeDeadlineSeconds"
    limit = spec.startup_deadline_seconds
    if limit is not None and not has_trained(observed) and observed.now - began >= limit:
        trouble = observed.trouble()
        why = f": {trouble.message}" if trouble else ""
        return "StartupDeadlineExceeded", f"it did not train within {limit} s, spec.startupDeadlineSeconds{why}"
    ends, last_words = observed.controller_ends()
    if ends > spec.failure_policy.max_restarts:
        return "RestartsExhausted", f"the controller ended {ends} times. Last lines of its log:\n{last_words}"
    return None


def has_trained(observed: Observed) -> bool:
    """Whether it has been Running since it started, or was resumed: its controller alone says so too early then."""
    return "trainingTime" in observed.status


def _next_deadline(observed: Observed, renderer: Renderer) -> float | None:
    spec = renderer.experiment.spec
    began = seconds(observed.status.get("startTime", "")) or observed.now
    limits = [spec.active_deadline_seconds, None if has_trained(observed) else spec.startup_deadline_seconds]
    return min((max(0.0, began + limit - observed.now) for limit in limits if limit is not None), default=None)


def _stop(plan: Plan, observed: Observed, last_wave: int) -> None:
    """Delete the first wave that is still there; the next one when its pods have ended."""
    for wave in range(last_wave + 1):
        components = components_in_wave(wave)
        workloads = [item for name in components for item in observed.workloads(name)]
        if workloads or observed.living(*components):
            is_pool = "trajectory-pool" in components
            plan.delete = [] if is_pool and plan.audit else workloads
            return


def _queue(plan: Plan, observed: Observed, renderer: Renderer) -> None:
    """Ask for admission, again when it was evicted and nothing runs any more."""
    admission = observed.admission
    if observed.living(*BY_NAME) or observed.has_predecessor:
        plan.again_in = PREDECESSOR_SECONDS
    elif admission is None:
        plan.apply = [with_pod_sets(renderer.admission(), observed.resource, renderer.workloads(1))]
    elif is_to_be_queued_again(admission, observed.now):
        plan.delete = [admission]
    elif (later := requeue_at(admission) - observed.now) > 0:
        plan.again_in = later


def _free_quota(plan: Plan, observed: Observed) -> None:
    if observed.admission is not None and not observed.living(*BY_NAME):
        plan.delete = [*plan.delete, observed.admission]


def _may_audit(observed: Observed) -> bool:
    """The ledger is counted when nobody changes it any more, by the pool, before that stops."""
    is_quiet = not observed.living(*components_in_wave(0), *components_in_wave(1))
    return is_quiet and _audited(observed) != FINAL_AUDIT and bool(observed.living("trajectory-pool"))


def _audited(observed: Observed) -> str:
    return str(observed.status.get("audit", {}).get("request", ""))


def _expire(plan: Plan, observed: Observed, renderer: Renderer) -> None:
    ttl = renderer.experiment.spec.ttl_seconds_after_finished
    if ttl is None:
        return
    remaining = seconds(observed.status.get("completionTime", "")) + ttl - observed.now
    if remaining <= 0:
        plan.delete = [observed.resource]
    else:
        plan.again_in = remaining
