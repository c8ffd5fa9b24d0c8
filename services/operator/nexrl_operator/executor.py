"""Carries out a plan: applies, scales and deletes objects, and talks to the experiment's controller."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nexrl.components import BY_NAME
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NexrlError, UnavailableError
from nexrl.k8s.api import EXPERIMENT, KINDS, RESOURCE_FLAVOR, Api, ApiError
from nexrl.restarts import backoff_seconds
from nexrl_operator.api_objects import attempt_of, component_of, has_finished, instances_of
from nexrl_operator.caches import Caches
from nexrl_operator.children import Renderer
from nexrl_operator.credentials import RENEW_SECONDS, SECRETS_SECONDS, Credentials
from nexrl_operator.drift import Drift
from nexrl_operator.experiment_clients import ExperimentClients
from nexrl_operator.experiment_state import ExperimentState
from nexrl_operator.object_names import NameTakenError, require_free_names
from nexrl_operator.objects import Object
from nexrl_operator.observed import WORKLOADS, Observed
from nexrl_operator.plan import PREDECESSOR_SECONDS, Plan, Stage, soonest
from nexrl_operator.queueing import QUEUE_LABEL, flavors_of, nodes_before, nodes_of, placed, queue_of
from nexrl_operator.reporter import Reporter
from nexrl_operator.revisions import content_digest
from nexrl_operator.setbacks import setbacks
from nexrl_operator.status import Verdict
from nexrl_operator.work_queue import Key

log = logging.getLogger(__name__)

MAX_PROBLEM = 500
RETRY_SECONDS = 2.0
AUDITING_SECONDS = 30.0
"""Time after which a failing audit is abandoned, because the pool will not become ready again."""
REFUSED_SECONDS = 60.0
"""Time until the operator tries again what the API server has refused."""

_WRONG_TYPE = ("failed to convert", "failed to create typed patch object")


@dataclass(frozen=True)
class Reconciliation:
    """One experiment, what was observed of it, and what to do about it."""

    observed: Observed
    renderer: Renderer
    plan: Plan
    state: ExperimentState

    @property
    def key(self) -> Key:
        """Namespace and name of the experiment."""
        return self.renderer.owner.namespace, self.renderer.owner.name


@dataclass(frozen=True)
class Outcome:
    """What carrying out a plan has shown."""

    verdict: Verdict
    requeue_after_seconds: float | None


class Executor:
    """Carries out the plans of all experiments."""

    def __init__(
        self,
        api: Api,
        caches: Caches,
        clients: ExperimentClients,
        credentials: Credentials,
        reporter: Reporter,
    ) -> None:
        self._api = api
        self._caches = caches
        self._clients = clients
        self._credentials = credentials
        self._reporter = reporter
        self._drift = Drift(api, caches, reporter)

    async def execute(self, current: Reconciliation) -> Outcome:
        """Carry out the plan. Raises NexrlError and the errors of aiohttp for failures that may pass."""
        plan, observed = current.plan, current.observed
        await self._follow(current)
        refusal, delays = None, [plan.requeue_after_seconds]
        try:
            await self._change_objects(current)
            delays.append(await self._drift.restore(observed, current.state, plan.compare, self._placed_again))
        except (ApiError, FailedPreconditionError, InvalidArgumentError) as error:
            refusal = _refusal(error)  # perhaps of a change: what runs must be looked after all the same
        if self._clients.is_following(current.key) and observed.ready("controller"):
            try:
                delays.append(await self._converse(current))
            except NameTakenError as error:
                refusal = _refusal(error)
            except NexrlError as error:  # the controller is unreachable; the status still reports the rest
                log.info("%s/%s: its controller: %s", *current.key, error)
                delays.append(RETRY_SECONDS)
        verdict = Verdict(
            failed=plan.failed,
            queue=queue_of(observed.resource),
            is_queued=plan.stage is Stage.QUEUE,
            pending_change=plan.pending_change,
        )
        if plan.audit:
            verdict = replace(verdict, audit=await self._audit(current))
            delays.append(RETRY_SECONDS if verdict.audit is None else None)
        if refusal:
            verdict = replace(verdict, accepted=refusal[0], accepted_message=refusal[1])
            delays.append(REFUSED_SECONDS)  # by then a quota may be larger, or a Secret exist
        return Outcome(verdict, soonest(*delays))

    async def _follow(self, current: Reconciliation) -> None:
        """Connect to the experiment's controller, or disconnect when it is gone."""
        observed = current.observed
        # Without a Deployment of its own, a ready pod belongs to a deleted experiment of this name.
        if observed.ready("controller") and observed.workloads("controller"):
            self._clients.follow(current.key)
        elif current.plan.stage in (Stage.QUEUE, Stage.PAUSE, Stage.CLEAR) and not observed.living("controller"):
            await self._clients.drop(current.key)

    # objects ---------------------------------------------------------------------------------------------------------

    async def _change_objects(self, current: Reconciliation) -> None:
        if current.plan.stage is Stage.RUN:
            await self._run(current)
        elif current.plan.stage is Stage.QUEUE:
            if not current.renderer.settings.kueue:
                raise FailedPreconditionError(
                    f"metadata.labels: {QUEUE_LABEL} needs Kueue; set kueue.enabled of the chart, or remove the label"
                )
            await require_free_names(self._api, current.observed, current.plan.apply)
            for item in current.plan.apply:
                self._caches.note(await self._api.apply(item))
        for item in current.plan.delete:
            metadata, kind = item["metadata"], KINDS[item.get("kind", EXPERIMENT.kind)]
            if await self._api.delete(kind, metadata["namespace"], metadata["name"], metadata["uid"]):
                log.info("%s/%s: deleted", metadata["namespace"], metadata["name"])
        if current.plan.stage is not Stage.RUN and current.observed.living(*BY_NAME):
            await self._credentials.keep_redis_login(current.renderer)  # they write their last state to Redis

    async def _run(self, current: Reconciliation) -> None:
        observed, items = current.observed, await self._placed(current.observed, current.plan.apply)
        await self._renew_secrets(current, items)
        for item, replicas in current.plan.scale:
            metadata, patch = item["metadata"], {"spec": {"replicas": replicas}}
            changed = await self._api.merge(KINDS[item["kind"]], metadata["namespace"], metadata["name"], patch)
            self._caches.note(changed)
            await self._reporter.event(observed, "Normal", "Scaled", f"{metadata['name']} has {replicas} replicas")
        # All or nothing: the API server must accept every object before the first one is created.
        for item in items:
            await self._api.apply(item, dry_run=True)
        for item in items:
            applied = await self._api.apply(item)
            self._caches.note(applied)
            current.state.verified[item["kind"], item["metadata"]["name"]] = content_digest(applied)
            if item["kind"] in WORKLOADS:
                note = f"{item['metadata']['name']} is applied"
                await self._reporter.event(observed, "Normal", f"Created{item['kind']}", note)

    async def _renew_secrets(self, current: Reconciliation, items: Sequence[Object]) -> None:
        observed, state = current.observed, current.state
        is_running = bool(observed.workloads("controller"))  # else it waits for a predecessor of its name to go
        missing = await self._missing_secrets(current) if is_running else []
        is_due = is_running and observed.now - state.secrets_renewed_at >= RENEW_SECONDS
        needs_secrets = any(item["kind"] in WORKLOADS for item in items)
        if not needs_secrets and not missing and not is_due:
            await require_free_names(self._api, observed, items)
            return
        secrets = await self._credentials.objects(current.renderer, is_running=is_running)
        await require_free_names(self._api, observed, [*secrets, *items])
        for item in secrets:
            await self._api.apply(item)
        state.secrets_renewed_at = observed.now
        if missing and observed.pods:  # before the first pod, nothing was there that somebody could delete
            note = f"{', '.join(missing)} did not exist, although pods need it; created again"
            await self._reporter.event(observed, "Warning", "DriftCorrected", note)

    async def _missing_secrets(self, current: Reconciliation) -> list[str]:
        """Return which Secrets of the experiment do not exist. It looks once in SECRETS_SECONDS: it watches none."""
        observed, state, missing = current.observed, current.state, []
        if observed.now - state.secrets_checked_at < SECRETS_SECONDS:
            return []
        for kind, name in self._credentials.kept(current.renderer):
            if await self._api.get(kind, current.key[0], name) is None:
                missing.append(f"{kind.kind} {name}")
        state.secrets_checked_at = observed.now
        return missing

    async def _placed(self, observed: Observed, items: Sequence[Object]) -> list[Object]:
        """Return the items, with pods that run on the nodes that the queue has assigned."""
        if observed.admission is None or not items:
            return list(items)
        assigned = flavors_of(observed.admission)
        names = {name for flavors in assigned.values() for name in flavors}
        flavors = {name: await self._api.get(RESOURCE_FLAVOR, "", name) or {} for name in names}
        return [
            placed(item, nodes_of(flavors, assigned.get(component_of(item), []))) if item["kind"] in WORKLOADS else item
            for item in items
        ]

    async def _placed_again(self, observed: Observed, item: Object) -> Object:
        """Return the item with pods on the nodes that the living object was placed on."""
        is_queued = observed.admission is not None and item["kind"] in WORKLOADS
        if is_queued and (nodes := nodes_before(observed.find(item))) is not None:
            return placed(item, nodes)
        [item] = await self._placed(observed, [item])
        return item

    # the experiment's controller -------------------------------------------------------------------------------------

    async def _converse(self, current: Reconciliation) -> float | None:
        """Report to the experiment's controller what has ended, and ask it what to restart.

        Returns the seconds after which to look again, if any. Raises NexrlError.
        """
        key, plan, requeue_after_seconds = current.key, current.plan, None
        for exit in plan.exits:
            await self._clients.report_exit_once(key, exit)
        if plan.ended_job is not None:
            requeue_after_seconds = await self._restart_gang(current, plan.ended_job)
        if plan.failed is not None:
            await self._clients.stop(key, f"{plan.failed[0]}: {plan.failed[1]}")
        if plan.stage in (Stage.END, Stage.CLEAR):
            living = [name for pod in current.observed.living(*BY_NAME) for name in instances_of(pod)]
            await self._clients.report_stopped(key, living)
        return requeue_after_seconds

    async def _restart_gang(self, current: Reconciliation, job: Object) -> float | None:
        """Create the trainer's next Job if the controller decides so; returns the seconds to wait for it, if any."""
        observed = current.observed
        if observed.seen is None or observed.living("trainer"):
            # The experiment may be about to end; and two trainers would write to one volume.
            return PREDECESSOR_SECONDS
        policy = current.renderer.experiment.spec.failure_policy
        delay_seconds = backoff_seconds(max(1, setbacks(observed, policy).disruptions))
        if not observed.is_disrupted(job):  # a drained node is no failure and does not count as one
            answer = await self._clients.report_exit(current.key, observed.job_exit(job))
            if not answer.restart:
                return None  # the controller ends the experiment; its next message says so
            delay_seconds = answer.delay_seconds
        remaining = (has_finished(job) or 0.0) + delay_seconds - observed.now
        if remaining > 0:
            return remaining
        [item] = await self._placed(observed, [current.renderer.workloads(attempt_of(job) + 1)["trainer"]])
        await require_free_names(self._api, observed, [item])
        self._caches.note(await self._api.apply(item))
        note = f"{job['metadata']['name']} ended; {item['metadata']['name']} continues"
        await self._reporter.event(observed, "Warning", "GangRestarted", note)
        return None

    async def _audit(self, current: Reconciliation) -> Mapping[str, int | str] | None:
        """Return the audit of the ledger, or why there is none; None while the operator tries again."""
        observed, state = current.observed, current.state
        try:
            if not observed.ready("trajectory-pool"):  # do not wait here: other experiments need this worker
                raise UnavailableError("no pod of the trajectory pool is ready")
            counts: Mapping[str, int | str] = await self._clients.audit(current.key)
        except NexrlError as error:
            if state.audit_failing_since is None:
                state.audit_failing_since = observed.now
            if observed.now - state.audit_failing_since < AUDITING_SECONDS:
                return None
            counts = {"problem": error.message[:MAX_PROBLEM]}
        state.audit_failing_since = None
        return {"request": current.plan.audit, **counts}


def _refusal(error: NexrlError) -> tuple[str, str]:
    """Reason and message of the condition Accepted for a refused change; raises the error again if it may pass."""
    reason = _reason(error)
    if reason is None:
        raise error
    return reason, error.message


def _reason(error: NexrlError) -> str | None:
    """Return the reason why an experiment is not accepted; None for an error that may pass."""
    if isinstance(error, NameTakenError):
        return "NameTaken"
    if isinstance(error, InvalidArgumentError):
        return "ConflictingPlacement"
    if not isinstance(error, ApiError):
        return "MissingPrerequisite"
    if error.code == 403:
        return "NotAllowed"
    # The API server answers a value of the wrong type with 500.
    is_invalid = error.code in (400, 422) or any(words in error.message for words in _WRONG_TYPE)
    return "InvalidTemplate" if is_invalid else None
