"""The status of an experiment, computed from what was observed. Pure; docs/reference/status.md explains it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexrl.components import BY_NAME
from nexrl.spec import ExperimentSpec
from nexrl_operator.api_objects import attempt_of, condition, rfc3339, seconds
from nexrl_operator.children import Renderer
from nexrl_operator.observed import Observed
from nexrl_operator.revisions import template_revision
from nexrl_operator.setbacks import setbacks
from nexrl_operator.troubles import find_trouble

PROGRESS_SECONDS = 10.0
"""Shortest time between two writes of the progress."""
SHOWN_METRICS = (
    *("reward_mean", "staleness_steps", "entropy", "mismatch_kl", "grad_norm", "loss", "samples"),
    *("truncated_fraction", "zero_variance_group_fraction", "val/reward", "val/exact"),
)
MAX_MESSAGE = 4000
TO_RESUME = (
    "\nTo start it again from its newest checkpoint, correct the cause, then: `nexrl resume {name}`, or set "
    "spec.suspend to true and, when the phase is Suspended, to false"
)
"""End of the message of every failure."""
STALLED = "Stalled"
"""The controller's reason while no component makes progress."""


@dataclass(frozen=True)
class Verdict:
    """What the executor has found out, in addition to what was observed."""

    accepted: str = "Accepted"
    """Reason of the condition Accepted; every other value than 'Accepted' makes it false."""
    accepted_message: str = "the experiment can be run"
    failed: tuple[str, str] | None = None
    """Reason and message of a failure that the operator has found."""
    queue: str = ""
    """The queue that the experiment waits in or is admitted by; "" for none."""
    is_queued: bool = False
    """Whether the queue has not admitted it."""
    pending_change: str = ""
    """What of the spec has changed and does not take effect while the experiment runs."""
    audit: Mapping[str, int | str] | None = None


def is_finished(status: Mapping[str, Any], *, is_suspended: bool) -> bool:
    """Return whether the experiment has ended. One that has failed and is then suspended has not: it can be resumed."""
    kinds = ("Complete",) if is_suspended else ("Complete", "Failed")
    return any(condition({"status": status}, kind).get("status") == "True" for kind in kinds)


def rejected(observed: Observed, reason: str, message: str) -> dict[str, Any]:
    """Return the status of an experiment that cannot be rendered: the old status with the reason."""
    if is_finished(observed.status, is_suspended=False):
        return dict(observed.status)
    generation = observed.resource["metadata"].get("generation", 0)
    found = [
        ("Accepted", "False", reason, message),
        ("Ready", "False", reason, message),
        ("Stalled", "True", reason, message),
    ]
    new = {kind for kind, *_ in found}
    kept = [each for each in observed.status.get("conditions", []) if each["type"] not in new]
    return {
        "phase": "Pending",
        **observed.status,
        "observedGeneration": generation,
        "conditions": [*_stamped(found, observed), *kept],
    }


def new_status(observed: Observed, renderer: Renderer, verdict: Verdict) -> dict[str, Any]:
    """Return the whole status. `lastTransitionTime` and progress stay the same if nothing has changed."""
    spec, old = renderer.experiment.spec, observed.status
    conditions = _stamped(_conditions(observed, renderer, verdict), observed)
    by_type = {each["type"]: each for each in conditions}
    is_queued = verdict.is_queued and not observed.living(*BY_NAME)
    now = "Queued" if is_queued else phase(observed, spec, by_type)
    rollout = {
        "replicas": len(observed.living("rollout")),
        "readyReplicas": observed.ready("rollout"),
        "selector": ",".join(f"{key}={value}" for key, value in renderer.owner.selector("rollout").items()),
    }
    status: dict[str, Any] = {
        "observedGeneration": observed.resource["metadata"].get("generation", 0),
        "phase": now,
        "conditions": conditions,
        "restarts": max(observed.seen.restarts if observed.seen else 0, old.get("restarts", 0)),
        "trainerAttempt": max([old.get("trainerAttempt", 0), *map(attempt_of, observed.workloads("trainer"))]),
        # The eviction must be on record: a Job ends only after its pod, and the reason with it, is deleted.
        "disruptedAttempt": observed.disrupted_attempt,
        "rollout": rollout,
        "trainer": {"replicas": renderer.replicas()["trainer"], "readyReplicas": observed.ready("trainer")},
        "results": _results(observed, renderer),
        "components": [
            {
                "name": name,
                "ready": observed.ready(name),
                "desired": desired,
                "revision": template_revision(renderer.experiment, name),
            }
            for name, desired in renderer.replicas().items()
        ],
    }
    if not spec.suspend:  # a resumed experiment has all its restarts
        status["setbacks"] = setbacks(observed, spec.failure_policy).as_status()
    return (
        status | _times(observed, now, spec, verdict, by_type) | _progress(observed) | _audit(observed, spec, verdict)
    )


def _results(observed: Observed, renderer: Renderer) -> dict[str, Any]:
    """Return what a pod needs that reads the volume, also when all pods of the experiment are gone."""
    settings, jobs = renderer.settings, observed.workloads("trainer")
    found = {"claim": renderer.claim()["metadata"]["name"], "image": settings.image_control}
    # The nodes of the trainer, as its template and its queue have chosen them: the volume may be on one of them.
    placed = jobs[-1]["spec"]["template"]["spec"] if jobs else observed.status.get("results", {})
    placement = {key: placed[key] for key in ("nodeSelector", "tolerations") if placed.get(key)}
    account = {"serviceAccountName": settings.service_account} if settings.service_account else {}
    return found | placement | account


def phase(observed: Observed, spec: ExperimentSpec, conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the phase: one word for people."""

    def holds(kind: str) -> bool:
        return conditions.get(kind, {}).get("status") == "True"

    if holds("Complete"):
        return "Succeeded"
    if holds("Failed"):
        return "Failed"
    if spec.suspend:
        return "Suspended" if holds("Suspended") else "Suspending"
    seen, old = observed.seen, str(observed.status.get("phase", ""))
    if seen is None and old in ("Running", "Restarting", "Stopping") and observed.workloads("controller"):
        return old  # an operator that has just started has no message of the controller yet
    if seen is None:
        return "Starting" if observed.pods else "Pending"
    if seen.is_ending:
        return "Stopping"
    if seen.phase == "Restarting":
        return "Restarting"
    # After a pause the controller continues in its old phase; training needs a trainer as well.
    return "Running" if seen.phase in ("Running", "Validating") and holds("TrainerReady") else "Starting"


_Condition = tuple[str, str, str, str]


def _conditions(observed: Observed, renderer: Renderer, verdict: Verdict) -> Iterator[_Condition]:
    spec = renderer.experiment.spec
    has_ended = is_finished(observed.status, is_suspended=spec.suspend)
    is_accepted = verdict.accepted == "Accepted"
    yield "Accepted", _word(is_accepted), verdict.accepted, verdict.accepted_message
    desired = renderer.replicas()
    parts = {
        "ServicesReady": ("controller", "trajectory-pool", "weight-sync"),
        "InferenceReady": ("inference",),
        "TrainerReady": ("trainer",),
        "RolloutReady": ("rollout",),
    }
    missing: dict[str, str] = {}
    for kind, components in parts.items():
        late = {
            name: f"{name} {observed.ready(name)}/{desired.get(name, 0)}"
            for name in components
            if observed.ready(name) < desired.get(name, 0)
        }
        missing |= late
        reason = "PodsReady" if not late else "Finished" if has_ended else "PodsNotReady"
        yield kind, _word(not late), reason, ", ".join(late.values()) or "all pods are ready"
    yield _ready(observed, spec, verdict, missing)
    is_suspended = spec.suspend and not observed.living(*BY_NAME)
    reason = "Suspended" if is_suspended else "Suspending" if spec.suspend else "NotSuspended"
    yield "Suspended", _word(is_suspended), reason, "spec.suspend is true" if spec.suspend else "spec.suspend is false"
    yield _stalled(observed, verdict)
    yield from _failing_samples(observed)
    yield from _admission(observed, renderer, verdict)
    if verdict.pending_change:
        message = f"{verdict.pending_change}; it takes effect after a suspension"
        yield "SpecChangePending", "True", "NotSuspended", message
    yield from _outcome(observed, spec, verdict)


def _admission(observed: Observed, renderer: Renderer, verdict: Verdict) -> Iterator[_Condition]:
    if not verdict.queue:
        return
    quota = condition(observed.admission or {}, "QuotaReserved")
    waits = quota.get("message") or f"waits in the queue {verdict.queue}"
    if verdict.is_queued:
        yield "Admitted", "False", quota.get("reason") or "Pending", waits
        return
    yield "Admitted", "True", "Admitted", f"admitted by the queue {verdict.queue}"
    asked, most = renderer.experiment.spec.rollout.replicas, renderer.max_rollouts
    if most is not None and asked > most:
        message = f"{most} of {asked} rollouts were admitted; suspend and resume to ask for more"
        yield "RolloutScaleLimited", "True", "Admitted", message


def _ready(observed: Observed, spec: ExperimentSpec, verdict: Verdict, missing: Mapping[str, str]) -> _Condition:
    seen, trouble = observed.seen, find_trouble(observed)
    if verdict.accepted != "Accepted":
        return "Ready", "False", verdict.accepted, verdict.accepted_message
    if is_finished(observed.status, is_suspended=spec.suspend):
        outcome = condition(observed.resource, "Failed") or condition(observed.resource, "Complete")
        return "Ready", "False", outcome["reason"], outcome["message"]
    if spec.suspend:
        return "Ready", "False", "Suspended", "spec.suspend is true"
    if verdict.is_queued:
        return "Ready", "False", "Queued", f"not admitted by the queue {verdict.queue}"
    if trouble is not None:
        return "Ready", "False", trouble.reason, trouble.message
    if missing:
        return (
            "Ready",
            "False",
            "PodsNotReady",
            f"waiting for {', '.join(missing.values())}{_unmade(observed, missing)}",
        )
    if seen is None:
        return "Ready", "False", "ControllerNotSeen", "the controller has not answered yet"
    is_on = seen.phase in ("Running", "Validating") and seen.reason != STALLED
    return "Ready", _word(is_on), seen.reason or seen.phase, seen.message or seen.phase


def _unmade(observed: Observed, missing: Iterable[str]) -> str:
    names = [name for name in missing if not observed.living(name)]
    return f"; no pod yet of {', '.join(names)}" if names else ""


def _stalled(observed: Observed, verdict: Verdict) -> _Condition:
    if verdict.accepted != "Accepted":
        return "Stalled", "True", verdict.accepted, verdict.accepted_message
    if observed.seen is not None and observed.seen.reason == STALLED:
        return "Stalled", "True", "NoProgress", observed.seen.message
    return "Stalled", "False", "Progressing", "the experiment makes progress"


def _failing_samples(observed: Observed) -> Iterator[_Condition]:
    # Without a controller, after the end or a restart of the operator, what it said last is true.
    old = condition(observed.resource, "SamplesFailing").get("message", "")
    if told := observed.seen.failing_samples if observed.seen else old:
        yield "SamplesFailing", "True", "AttemptsFailed", told


def _outcome(observed: Observed, spec: ExperimentSpec, verdict: Verdict) -> Iterator[_Condition]:
    if is_finished(observed.status, is_suspended=spec.suspend):
        for kind in ("Complete", "Failed"):
            if old := condition(observed.resource, kind):
                yield kind, old["status"], old["reason"], old["message"]
        return
    seen, failed = observed.seen, verdict.failed
    if seen is not None and seen.has_ended and not observed.living(*(set(BY_NAME) - {"controller"})):
        if seen.phase == "Succeeded":
            yield "Complete", "True", seen.reason or seen.phase, seen.message
            return
        failed = failed or (seen.reason or seen.phase, seen.message)
    if failed is not None and not spec.suspend:
        (reason, message), remedy = failed, TO_RESUME.format(name=observed.resource["metadata"]["name"])
        yield "Failed", "True", reason, f"{message[: MAX_MESSAGE - len(remedy)]}{remedy}"


def _times(
    observed: Observed, phase: str, spec: ExperimentSpec, verdict: Verdict, conditions: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    old, times = observed.status, {}
    is_resting = spec.suspend or verdict.is_queued
    if not is_resting or is_finished(old, is_suspended=spec.suspend):
        times["startTime"] = old.get("startTime") or rfc3339(observed.now)
        if phase == "Running" or "trainingTime" in old:
            times["trainingTime"] = old.get("trainingTime") or rfc3339(observed.now)
    if any(conditions.get(kind, {}).get("status") == "True" for kind in ("Complete", "Failed")):
        times["completionTime"] = old.get("completionTime") or rfc3339(observed.now)
    return times


def _progress(observed: Observed) -> dict[str, Any]:
    old, seen = observed.status.get("progress"), observed.seen
    if seen is None:
        return {"progress": old} if old else {}
    new = {
        "step": seen.step,
        "totalSteps": seen.total_steps,
        "policyVersion": seen.policy_version,
        "metrics": {name: f"{seen.metrics[name]:.6g}" for name in SHOWN_METRICS if name in seen.metrics},
    }
    for key, name in (("reward", "reward_mean"), ("staleness", "staleness_steps")):
        if name in seen.metrics:
            new[key] = f"{seen.metrics[name]:.3g}"
    if old and {**old, "lastUpdateTime": ""} == {**new, "lastUpdateTime": ""}:
        return {"progress": old}
    if old and not seen.is_ending and observed.now - seconds(old.get("lastUpdateTime", "")) < PROGRESS_SECONDS:
        return {"progress": old}
    return {"progress": {**new, "lastUpdateTime": rfc3339(observed.now)}}


def _audit(observed: Observed, spec: ExperimentSpec, verdict: Verdict) -> dict[str, Any]:
    # The final audit of a failure is not that of the resumed experiment.
    is_resumed = spec.suspend and condition(observed.resource, "Failed")
    audit = verdict.audit or (None if is_resumed else observed.status.get("audit"))
    return {"audit": dict(audit)} if audit else {}


def _stamped(conditions: Iterator[_Condition] | Sequence[_Condition], observed: Observed) -> list[dict[str, Any]]:
    generation = observed.resource["metadata"].get("generation", 0)
    stamped = []
    for kind, status, reason, message in conditions:
        old = condition(observed.resource, kind)
        since = old["lastTransitionTime"] if old.get("status") == status else rfc3339(observed.now)
        stamped.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message[:MAX_MESSAGE],
                "lastTransitionTime": since,
                "observedGeneration": generation,
            }
        )
    return stamped


def _word(is_true: bool) -> str:
    return "True" if is_true else "False"
