"""What to do about one experiment now: a pure function of what was observed. The executor carries it out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile

from nexrl.components import BY_NAME, stop_waves
from nexrl.restarts import action_after
from nexrl.spec.marks import may_change
from nexrl.spec.section import ROLLING
from nexrl_operator.api_objects import attempt_of, has_finished, seconds
from nexrl_operator.children import Renderer
from nexrl_operator.objects import ATTEMPT_LABEL, Object
from nexrl_operator.observed import Exit, Observed
from nexrl_operator.queueing import is_admitted, is_to_be_queued_again, new_workload, queue_of, requeue_at
from nexrl_operator.revisions import is_outdated, is_rendered_alike, is_replaced_by_hand, revision_of
from nexrl_operator.setbacks import MAX_DISRUPTIONS, setbacks
from nexrl_operator.status import is_finished
from nexrl_operator.troubles import find_trouble, next_trouble_seconds

ROLLING_COMPONENTS = tuple(name for name, each in BY_NAME.items() if f"{each.section}.template" in may_change(ROLLING))
"""Components whose pods are replaced one by one when their template changes."""
AUDIT_ANNOTATION = "nexrl.dev/audit"
"""An annotation. If its value differs from status.audit.request, the operator audits the ledger."""
PREDECESSOR_SECONDS = 2.0
"""Time until pods that are still stopping are checked again."""
FINAL_AUDIT = "final"


class Stage(Enum):
    """What the experiment is about to do."""

    RUN = "run"
    QUEUE = "queue"
    """Its queue has not admitted it, or has evicted it."""
    PAUSE = "pause"
    END = "end"
    """Its controller has decided how it ends. The components stop, and the controller is told."""
    CLEAR = "clear"
    """Its status says that it has ended. Everything that is left stops."""


@dataclass(frozen=True)
class Plan:
    """What to do now."""

    stage: Stage
    apply: Sequence[Object] = ()
    compare: Sequence[Object] = ()
    """Objects as they were applied, to be applied again if somebody has changed them."""
    scale: Sequence[tuple[Object, int]] = ()
    """Workloads that need nothing but another number of pods."""
    delete: Sequence[Object] = ()
    exits: Sequence[Exit] = ()
    """Ended containers that the experiment's controller must know of."""
    ended_job: Object | None = None
    """The trainer's Job if it has ended: the controller decides whether another one is created."""
    audit: str = ""
    """The request that an audit of the ledger answers; "" for none."""
    failed: tuple[str, str] | None = None
    """Reason and message of a failure that the operator has found."""
    pending_change: str = ""
    """What of the spec has changed and does not take effect while the experiment runs."""
    requeue_after_seconds: float | None = None


def soonest(*delays: float | None) -> float | None:
    """Return the shortest of these delays; None if there is none."""
    return min((delay for delay in delays if delay is not None), default=None)


def stage_of(observed: Observed, renderer: Renderer) -> Stage:
    """Return what the experiment is about to do."""
    if is_finished(observed.status, is_suspended=renderer.experiment.spec.suspend):
        return Stage.CLEAR
    if renderer.experiment.spec.suspend:
        return Stage.PAUSE
    if observed.seen is not None and observed.seen.is_ending:
        return Stage.END
    return Stage.QUEUE if queue_of(observed.resource) and not is_admitted(observed.admission) else Stage.RUN


def make_plan(observed: Observed, renderer: Renderer) -> Plan:
    """Return what to do now."""
    stage = stage_of(observed, renderer)
    match stage:
        case Stage.RUN:
            return _run(observed, renderer)
        case Stage.END:
            audit = _final_audit(observed)
            return Plan(stage, audit=audit, delete=_stopped(observed, stop_waves()[:-1], audit=audit))
        case Stage.QUEUE:
            return _queue(observed, renderer)
        case Stage.PAUSE:
            return Plan(stage, delete=[*_stopped(observed, stop_waves()), *_freed_quota(observed)])
        case Stage.CLEAR:
            return _clear(observed, renderer)


def next_attempt(observed: Observed) -> int:
    """Return the number of the trainer's next Job; no number is used twice."""
    known = [attempt_of(job) for job in observed.children if job["kind"] == "Job"]
    return max([int(observed.status.get("trainerAttempt", 0)), *known]) + 1


# running --------------------------------------------------------------------------------------------------------------


def _run(observed: Observed, renderer: Renderer) -> Plan:
    failed = _failure(observed, renderer)
    if failed is not None:
        return Plan(Stage.RUN, failed=failed)
    plan = Plan(
        Stage.RUN,
        exits=observed.exits(),
        audit=_requested_audit(observed),
        requeue_after_seconds=soonest(_next_deadline(observed, renderer), next_trouble_seconds(observed)),
    )
    is_running = any(observed.workloads(name) for name in BY_NAME)
    if not is_running and (observed.living(*BY_NAME) or observed.has_predecessor):
        # Pods from before a pause, or a volume with another experiment's checkpoints: wait until they are gone.
        return _joined(plan, [_wait_for_predecessor()])
    parts = [_foundation(observed, renderer, is_running)]
    # An operator that has just started does not know yet whether the experiment is about to end.
    knows_controller = observed.seen is not None or not observed.workloads("controller")
    for component, item in renderer.workloads(next_attempt(observed)).items():
        if observed.workloads(component) or knows_controller:
            parts.append(_component(observed, component, item))
    return _joined(plan, parts)


def _joined(plan: Plan, parts: Sequence[Plan]) -> Plan:
    """`plan` with what the parts add to it."""
    return replace(
        plan,
        apply=[item for part in parts for item in part.apply],
        compare=[item for part in parts for item in part.compare],
        scale=[change for part in parts for change in part.scale],
        ended_job=next((part.ended_job for part in parts if part.ended_job is not None), None),
        pending_change=next((part.pending_change for part in reversed(parts) if part.pending_change), ""),
        requeue_after_seconds=soonest(plan.requeue_after_seconds, *(part.requeue_after_seconds for part in parts)),
    )


def _wait_for_predecessor() -> Plan:
    return Plan(Stage.RUN, requeue_after_seconds=PREDECESSOR_SECONDS)


def _foundation(observed: Observed, renderer: Renderer, is_running: bool) -> Plan:
    configuration, *others = renderer.foundation()
    found = observed.find(configuration)
    apply = [
        item
        for item in (configuration, *others)
        # While the experiment runs, nothing is rendered again: an upgrade of the operator must not disturb it.
        if not observed.has(item) or (not is_running and item["kind"] != "PersistentVolumeClaim")
    ]
    if found is not None and is_running and is_outdated(found, configuration):
        apply.append(configuration)
    is_changed = found is not None and revision_of(found) != revision_of(configuration)
    pending = "the spec has changed in a way that needs a restart of all pods" if is_running and is_changed else ""
    applied = [
        item for item in (configuration, *others) if item not in apply and item["kind"] != "PersistentVolumeClaim"
    ]
    compare = [item for item in applied if _is_comparable(observed.find(item), item)]
    return Plan(Stage.RUN, apply=apply, compare=compare, pending_change=pending)


def _component(observed: Observed, component: str, item: Object) -> Plan:
    found = observed.workloads(component)
    if not found and observed.living(component):
        return _wait_for_predecessor()  # two trainers would write to one volume
    if not found:
        return Plan(Stage.RUN, apply=[item])
    newest = found[-1]
    if component == "trainer" and has_finished(newest) is not None:
        return Plan(Stage.RUN, ended_job=newest)
    if revision_of(newest) != revision_of(item) and not is_replaced_by_hand(newest):
        if component in ROLLING_COMPONENTS:
            return Plan(Stage.RUN, apply=[item])
        return Plan(Stage.RUN, pending_change=f"the template of {component} has changed")
    if component != "trainer" and newest["spec"].get("replicas") != item["spec"]["replicas"]:
        return Plan(Stage.RUN, scale=[(newest, item["spec"]["replicas"])])
    return Plan(Stage.RUN, compare=[_named_like(newest, item)] if _is_comparable(newest, item) else [])


def _named_like(live: Object, item: Object) -> Object:
    """Return `item`, which may be the trainer's next Job, with the name and number of the Job that runs."""
    metadata, labels = item["metadata"], dict(item["metadata"]["labels"])
    if number := attempt_of(live):
        labels[ATTEMPT_LABEL] = str(number)
    return {**item, "metadata": {**metadata, "name": live["metadata"]["name"], "labels": labels}}


def _is_comparable(live: Object | None, item: Object) -> bool:
    """Return whether the object must be as rendered here. Another version of the operator renders others."""
    return live is not None and (is_rendered_alike(live, item) or is_replaced_by_hand(live))


def _failure(observed: Observed, renderer: Renderer) -> tuple[str, str] | None:
    """Return a failure that ends the experiment without its controller, because that may be what does not start."""
    spec, status = renderer.experiment.spec, observed.status
    began = seconds(status.get("startTime", "")) or observed.now
    limit = spec.active_deadline_seconds
    if limit is not None and observed.now - began >= limit:
        return "DeadlineExceeded", f"it has run for {limit} s, which is spec.activeDeadlineSeconds"
    limit = spec.startup_deadline_seconds
    if limit is not None and not has_trained(observed) and observed.now - began >= limit:
        trouble = find_trouble(observed)
        why = f": {trouble.message}" if trouble else ""
        return "StartupDeadlineExceeded", f"it did not train within {limit} s, spec.startupDeadlineSeconds{why}"
    record, (_, ends, newest) = setbacks(observed, spec.failure_policy), observed.controller_ends()
    if record.disruptions > MAX_DISRUPTIONS:
        told = f"pods of the trainer were evicted or deleted {record.disruptions} times without a new step"
        return "RestartsExhausted", f"{told}; find out what evicts them (kubectl get events), or give them a priority"
    is_final = ends and action_after(spec.failure_policy, newest.component, newest.exit_code) == "Fail"
    if is_final or record.controller_ends > spec.failure_policy.max_restarts:
        times = f"{ends} times" if is_final else f"{record.controller_ends} times without a new step"
        told = f"the controller ended {times}, the last time with exit code {newest.exit_code}"
        last = "".join(f": {line}" for line in newest.log_tail.splitlines()[-1:])
        return "RestartsExhausted", f"{told}{last}. Last lines of its log:\n{newest.log_tail}"
    return None


def has_trained(observed: Observed) -> bool:
    """Return whether it has been Running since its start or its last resumption.

    The controller cannot tell: after a resumption it reports Running before there is a trainer.
    """
    return "trainingTime" in observed.status


def _next_deadline(observed: Observed, renderer: Renderer) -> float | None:
    spec = renderer.experiment.spec
    began = seconds(observed.status.get("startTime", "")) or observed.now
    limits = [spec.active_deadline_seconds, None if has_trained(observed) else spec.startup_deadline_seconds]
    return soonest(*(max(0.0, began + limit - observed.now) for limit in limits if limit is not None))


# stopping -------------------------------------------------------------------------------------------------------------


def _clear(observed: Observed, renderer: Renderer) -> Plan:
    audit = _final_audit(observed)  # an experiment that failed by a deadline had no END
    delete = [*_stopped(observed, stop_waves(), audit=audit), *_freed_quota(observed)]
    ttl = renderer.experiment.spec.ttl_seconds_after_finished
    if ttl is None:
        return Plan(Stage.CLEAR, audit=audit, delete=delete)
    remaining = seconds(observed.status.get("completionTime", "")) + ttl - observed.now
    if remaining <= 0:
        return Plan(Stage.CLEAR, audit=audit, delete=[observed.resource])
    return Plan(Stage.CLEAR, audit=audit, delete=delete, requeue_after_seconds=remaining)


def _stopped(observed: Observed, waves: Sequence[Sequence[str]], *, audit: str = "") -> list[Object]:
    """Return the workloads of the first wave that still exists. The next wave follows when its pods have ended."""
    for components in waves:
        workloads = [item for name in components for item in observed.workloads(name)]
        if workloads or observed.living(*components):
            return [] if audit and "trajectory-pool" in components else workloads  # the pool audits first
    return []


def _queue(observed: Observed, renderer: Renderer) -> Plan:
    """Stop all pods, then ask for admission; after an eviction, ask again."""
    plan, admission = Plan(Stage.QUEUE, delete=_stopped(observed, stop_waves())), observed.admission
    if observed.living(*BY_NAME) or observed.has_predecessor:
        return replace(plan, requeue_after_seconds=PREDECESSOR_SECONDS)
    if admission is None:
        return replace(plan, apply=[new_workload(renderer.owner, observed.resource, renderer.workloads(1))])
    if is_to_be_queued_again(admission, observed.now):
        return replace(plan, delete=[admission])
    remaining = requeue_at(admission) - observed.now
    return replace(plan, requeue_after_seconds=remaining) if remaining > 0 else plan


def _freed_quota(observed: Observed) -> list[Object]:
    """Return the Kueue Workload once no pod is left: deleting it frees its quota."""
    return [observed.admission] if observed.admission is not None and not observed.living(*BY_NAME) else []


# audits ---------------------------------------------------------------------------------------------------------------


def _requested_audit(observed: Observed) -> str:
    asked = str(observed.resource["metadata"].get("annotations", {}).get(AUDIT_ANNOTATION, ""))
    is_new = asked not in (_audited(observed), FINAL_AUDIT)
    return asked if is_new and observed.ready("trajectory-pool") else ""


def _final_audit(observed: Observed) -> str:
    """Return the final audit once no component changes the ledger any more, and while a pool is left to make it."""
    busy = [name for wave in takewhile(lambda wave: "trajectory-pool" not in wave, stop_waves()) for name in wave]
    is_due = not observed.living(*busy) and _audited(observed) != FINAL_AUDIT
    return FINAL_AUDIT if is_due and observed.living("trajectory-pool") else ""


def _audited(observed: Observed) -> str:
    return str(observed.status.get("audit", {}).get("request", ""))
