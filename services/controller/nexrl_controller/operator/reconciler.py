"""Makes the cluster what each experiment asks for: sees, plans (`plan`), acts, and says so in the status (`status`)."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
from prometheus_client import Counter, Gauge, Histogram

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NexrlError, UnavailableError
from nexrl.k8s.api import (
    CERTIFICATE,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    EXPERIMENT,
    JOB,
    KINDS,
    NETWORK_POLICY,
    POD,
    RESOURCE_FLAVOR,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    WORKLOAD,
    Api,
    ApiError,
)
from nexrl.spec import SpecError, parse_experiment, yaml_core
from nexrl_controller.operator.cache import Cache
from nexrl_controller.operator.children import BY_NAME, EXPERIMENT_LABEL, RUN_FOLDER, Owner, Renderer
from nexrl_controller.operator.events import event_of_change, new_event
from nexrl_controller.operator.followers import Followers
from nexrl_controller.operator.identity import RENEW_SECONDS, Identity
from nexrl_controller.operator.ledgers import Ledgers
from nexrl_controller.operator.observed import (
    WORKLOADS,
    Observed,
    attempt_of,
    component_of,
    experiment_of,
    has_finished,
    instance_of,
    is_deleted,
    is_made_here,
    owner_uid,
)
from nexrl_controller.operator.plan import PREDECESSOR_SECONDS, Plan, Stage, make_plan
from nexrl_controller.operator.queueing import QUEUE_LABEL, admitted_counts, flavors_of, placed, queue_of
from nexrl_controller.operator.settings import OperatorSettings
from nexrl_controller.operator.status import PROGRESS_SECONDS, Verdict, new_status, rejected
from nexrl_controller.operator.work_queue import Key, WorkQueue

log = logging.getLogger(__name__)

Object = dict[str, Any]

MANAGER = "nexrl.dev/experiment-controller"
OWNED = (CONFIG_MAP, CLAIM, SERVICE, NETWORK_POLICY, DEPLOYMENT, STATEFUL_SET, JOB, POD)
MAX_PROBLEM = 500
RETRY_SECONDS = 2.0
AUDITING_SECONDS = 30.0
"""A pool that has not answered for this long does not come up any more."""
OBEYED = ("suspend", "activeDeadlineSeconds", "startupDeadlineSeconds", "ttlSecondsAfterFinished")
"""What an experiment is asked for is done, whatever else its spec has wrong."""
REFUSED_SECONDS = 60.0
"""Time until what the API server has refused is tried again."""

_WRONG_TYPE = ("failed to convert", "failed to create typed patch object")

RECONCILED = Counter("nexrl_operator_reconcile_total", "Reconciliations.", ["result"])
SECONDS = Histogram("nexrl_operator_reconcile_duration_seconds", "Time of one reconciliation.")
PHASES = Gauge(
    "nexrl_experiment_phase", "1 for the phase that an experiment is in.", ["namespace", "experiment", "phase"]
)


class NameTakenError(FailedPreconditionError):
    """An object that the experiment needs is there, and not its own."""


class Reconciler:
    """Reconciles one experiment at a time; ask `reconcile` again whenever anything about it has changed."""

    def __init__(
        self, api: Api, settings: OperatorSettings, queue: WorkQueue, followers: Followers, identity: Identity
    ) -> None:
        self._api = api
        self._settings = settings
        self._queue = queue
        self._followers = followers
        self._identity = identity
        self._ledgers = Ledgers(settings.redis_url, identity)
        self._uids: dict[Key, str] = {}
        """Of what is held here about an experiment of that name."""
        self._known: dict[Key, str] = {}
        """The ledgers of experiments in the release's Redis."""
        self._shown: dict[Key, str] = {}
        self._audited_from: dict[Key, float] = {}
        """When the first try of a count failed."""
        self._identified: dict[Key, float] = {}
        """When the Secrets of an experiment were looked at last."""
        self.experiments = Cache(EXPERIMENT, settings.namespace, "", self._on_experiment)
        owned = (*OWNED, WORKLOAD) if settings.kueue else OWNED
        self.owned = {kind: Cache(kind, settings.namespace, EXPERIMENT_LABEL, self._on_child) for kind in owned}
        self._children: dict[Key, dict[tuple[str, str], Object]] = {}

    def close(self) -> None:
        """End what goes on in the background."""
        self._ledgers.close()

    @property
    def caches(self) -> list[Cache]:
        """All caches."""
        return [self.experiments, *self.owned.values()]

    async def reconcile(self, key: Key) -> bool:
        """Bring one experiment nearer to what it asks for; False when it is to be tried again."""
        began = time.monotonic()
        try:
            await self._reconcile(key)
        except (NexrlError, aiohttp.ClientError, OSError) as error:
            is_conflict = isinstance(error, ApiError) and error.code in (404, 409)
            log.log(logging.INFO if is_conflict else logging.WARNING, "%s/%s: %s", *key, str(error) or repr(error))
            RECONCILED.labels("conflict" if is_conflict else "error").inc()
            return False
        except Exception:  # what one experiment brings up must not keep the operator from the others
            log.exception("%s/%s", *key)
            RECONCILED.labels("error").inc()
            return False
        finally:
            SECONDS.observe(time.monotonic() - began)
        RECONCILED.labels("success").inc()
        return True

    async def _reconcile(self, key: Key) -> None:
        resource = self.experiments.get(*key)
        uid = resource["metadata"]["uid"] if resource is not None else ""
        if self._uids.get(key, uid) != uid:  # one of the same name may be there already
            await self._forget(key)
            if (ledger := self._known.pop(key, None)) is not None:
                self._ledgers.end(ledger)
        if resource is None:
            self._uids.pop(key, None)
            return
        self._uids[key] = uid
        if is_deleted(resource):
            await self._forget(key)
            return
        if resource["spec"].get("managedBy", MANAGER) != MANAGER:
            return
        observed = self._observe(key, resource)
        try:
            renderer, wrong = self._obeyed(observed)
        except SpecError as error:
            await self._write_status(observed, rejected(observed, "InvalidSpec", error.message))
            return
        if renderer.experiment.spec.redis.url is None:
            self._known[key] = renderer.owner.ledger
        plan = make_plan(observed, renderer)
        if wrong:  # what runs is looked after, and can be stopped; nothing is changed
            plan.apply, plan.scale = [], []
        await self._follow(key, observed, plan)
        verdict = await self._act(key, observed, renderer, plan)
        if wrong:
            verdict = replace(verdict, accepted="InvalidSpec", accepted_message=wrong)
        status = new_status(observed, renderer, verdict)
        await self._write_status(observed, status)
        self._come_again(key, observed, plan, status)

    def _observe(self, key: Key, resource: Object) -> Observed:
        items = [item for item in self._children.get(key, {}).values() if is_made_here(item)]
        uid = resource["metadata"]["uid"]
        # Those of an experiment of this name that was deleted are the garbage collector's.
        objects = [item for item in items if item["kind"] != POD.kind]
        children = [item for item in objects if owner_uid(item) == uid]
        pods = [item for item in items if item["kind"] == POD.kind]
        has_predecessor = any(owner_uid(item) not in ("", uid) for item in objects)
        return Observed(
            resource, children, pods, self._followers.seen(key), time.time(), has_predecessor=has_predecessor
        )

    def _obeyed(self, observed: Observed) -> tuple[Renderer, str]:
        """By its spec, and ""; where that is wrong by the one that its pods read, and what is wrong. Raises SpecError
        where it was never started."""
        asked = observed.resource["spec"]
        try:
            return self._renderer(observed, asked), ""
        except SpecError as error:
            found = next((each for each in observed.children if each["kind"] == CONFIG_MAP.kind), None)
            if found is None:
                raise
            began = yaml_core.load(found["data"]["experiment.yaml"])["spec"]
            spec = {key: value for key, value in began.items() if key not in OBEYED}
            return self._renderer(observed, spec | {key: asked[key] for key in OBEYED if key in asked}), error.message

    def _renderer(self, observed: Observed, spec: Object) -> Renderer:
        resource, metadata = observed.resource, observed.resource["metadata"]
        # No annotations: that of kubectl apply is as long as the object.
        known = {name: metadata[name] for name in ("name", "namespace")}
        document = {"apiVersion": EXPERIMENT.api_version, "kind": EXPERIMENT.kind, "metadata": known}
        experiment = parse_experiment(document | {"spec": spec}, RUN_FOLDER)
        owner = Owner(metadata["namespace"], metadata["name"], metadata["uid"])
        admission = observed.admission if queue_of(resource) else None
        most = admitted_counts(admission).get("rollout", 0) if admission else None
        return Renderer(owner, experiment, self._settings, most)

    # acting ----------------------------------------------------------------------------------------------------------

    async def _follow(self, key: Key, observed: Observed, plan: Plan) -> None:
        # Without a Deployment of its own, the pod is that of a deleted experiment of this name.
        if observed.ready("controller") and observed.workloads("controller"):
            self._followers.follow(key)
        elif plan.stage in (Stage.QUEUE, Stage.PAUSE, Stage.CLEAR) and not observed.living("controller"):
            await self._followers.drop(key)

    async def _act(self, key: Key, observed: Observed, renderer: Renderer, plan: Plan) -> Verdict:
        refusal = None
        try:
            if plan.stage is Stage.RUN:
                await self._place(observed, plan.apply)
                await self._start(observed, renderer, plan)
            elif plan.stage is Stage.QUEUE:
                self._require_kueue()
                await self._require_free(observed, plan.apply)
                for item in plan.apply:
                    self._note(await self._api.apply(item))
            for item in plan.delete:
                await self._delete(item)
        except (ApiError, FailedPreconditionError, InvalidArgumentError) as error:
            refusal = _refusal(plan, error)  # of a change, maybe: what runs is looked after all the same
        if self._followers.is_following(key) and observed.ready("controller"):
            try:
                await self._converse(key, observed, renderer, plan)
            except NameTakenError as error:
                refusal = _refusal(plan, error)
            except NexrlError as error:  # one that is away for a moment; the status tells of all else meanwhile
                log.info("%s/%s: its controller: %s", *key, error)
                plan.again_in = RETRY_SECONDS
        verdict = Verdict(
            failed=plan.failed,
            queue=queue_of(observed.resource),
            is_queued=plan.stage is Stage.QUEUE,
            pending_change=plan.pending_change,
            audit=await self._audit(key, observed, plan) if plan.audit else None,
        )
        return replace(verdict, accepted=refusal[0], accepted_message=refusal[1]) if refusal else verdict

    def _require_kueue(self) -> None:
        if not self._settings.kueue:
            raise FailedPreconditionError(
                f"the label {QUEUE_LABEL} asks for Kueue, which the chart's kueue.enabled is for"
            )

    async def _require_free(self, observed: Observed, items: Sequence[Object]) -> None:
        """Raises NameTakenError when one of the objects to be made is there and somebody else's."""
        metadata = observed.resource["metadata"]
        for item in items:
            if observed.has(item):
                continue  # and its own: `_observe` has seen to that
            kind, name = KINDS[item["kind"]], item["metadata"]["name"]
            found = await self._api.get(kind, metadata["namespace"], name)
            if found is None and kind is CERTIFICATE:  # cert-manager would write over what is in its Secret
                await self._require_own_secret(item)
            if found is None or owner_uid(found) == metadata["uid"]:
                continue
            if is_deleted(found) or _is_of_predecessor(found, metadata["name"]):
                raise UnavailableError(f"{kind.kind} {name}: of a deleted experiment of this name, and not gone yet")
            raise NameTakenError(f"{kind.kind} {name} is there, and not of this experiment: delete or rename one")

    async def _require_own_secret(self, certificate: Object) -> None:
        metadata, name = certificate["metadata"], certificate["spec"]["secretName"]
        found = await self._api.get(SECRET, metadata["namespace"], name)
        made_for = (found or {}).get("metadata", {}).get("annotations", {}).get("cert-manager.io/certificate-name")
        if found is not None and made_for != metadata["name"]:
            raise NameTakenError(f"Secret {name} is there, and not of this experiment: delete or rename one")

    async def _place(self, observed: Observed, items: Sequence[Object]) -> None:
        """Have the pods of what is to be applied run on the nodes that the queue has assigned."""
        if observed.admission is None or not items:
            return
        assigned = flavors_of(observed.admission)
        names = {name for flavors in assigned.values() for name in flavors}
        flavors = {name: await self._api.get(RESOURCE_FLAVOR, "", name) or {} for name in names}
        for item in items:
            if item["kind"] in WORKLOADS:
                template = item["spec"]["template"]
                item["spec"]["template"] = placed(template, flavors, assigned.get(component_of(item), []))

    async def _start(self, observed: Observed, renderer: Renderer, plan: Plan) -> None:
        key = renderer.owner.namespace, renderer.owner.name
        if plan.apply or observed.now - self._identified.get(key, 0.0) >= RENEW_SECONDS:
            secrets = await self._identity.objects(renderer)
            await self._require_free(observed, [*secrets, *plan.apply])
            for item in secrets:
                await self._api.apply(item)
            self._identified[key] = observed.now
        for item, replicas in plan.scale:
            metadata, patch = item["metadata"], {"spec": {"replicas": replicas}}
            changed = await self._api.merge(KINDS[item["kind"]], metadata["namespace"], metadata["name"], patch)
            self._note(changed)
            await self._event(observed, "Normal", "Scaled", f"{metadata['name']} has {replicas} replicas")
        # All or nothing: what one template has wrong is not to be found with the others running.
        for item in plan.apply:
            await self._api.apply(item, dry_run=True)
        for item in plan.apply:
            self._note(await self._api.apply(item))
            if item["kind"] in WORKLOADS:
                await self._event(
                    observed, "Normal", f"Created{item['kind']}", f"{item['metadata']['name']} is applied"
                )

    async def _converse(self, key: Key, observed: Observed, renderer: Renderer, plan: Plan) -> None:
        """Tell the experiment's controller what has ended, and ask it what is to start again."""
        for exit in plan.exits:
            await self._followers.tell_exit(key, exit)
        if plan.ended_job is not None:
            await self._start_gang_again(key, observed, renderer, plan)
        if plan.failed is not None:
            await self._followers.stop(key, f"{plan.failed[0]}: {plan.failed[1]}")
        if plan.stage in (Stage.END, Stage.CLEAR):
            await self._followers.tell_stopped(key, [instance_of(pod) for pod in observed.living(*BY_NAME)])

    async def _start_gang_again(self, key: Key, observed: Observed, renderer: Renderer, plan: Plan) -> None:
        job = plan.ended_job
        assert job is not None
        if observed.seen is None or observed.living("trainer"):
            plan.again_in = PREDECESSOR_SECONDS  # it may be about to end; two trainers would write to one volume
            return
        delay_seconds = 0.0
        if not observed.is_disrupted(job):  # that is nobody's failure, and does not count as one
            answer = await self._followers.verdict(key, observed.job_exit(job))
            if not answer.restart:
                return  # the controller ends the experiment, and we shall hear of it
            delay_seconds = answer.delay_seconds
        remaining = (has_finished(job) or 0.0) + delay_seconds - observed.now
        if remaining > 0:
            plan.again_in = remaining
            return
        item = renderer.workloads(attempt_of(job) + 1)["trainer"]
        await self._place(observed, [item])
        await self._require_free(observed, [item])
        self._note(await self._api.apply(item))
        await self._event(
            observed, "Warning", "GangRestarted", f"{job['metadata']['name']} ended; {item['metadata']['name']} goes on"
        )

    async def _audit(self, key: Key, observed: Observed, plan: Plan) -> Mapping[str, int | str] | None:
        """The count of the ledger, or why there is none; None when it is to be tried again."""
        try:
            if not observed.ready("trajectory-pool"):  # not to be waited for here: others wait for this worker
                raise UnavailableError("no pod of the trajectory pool is ready")
            counts: Mapping[str, int | str] = await self._followers.audit(key)
        except NexrlError as error:
            if observed.now - self._audited_from.setdefault(key, observed.now) < AUDITING_SECONDS:
                plan.again_in = RETRY_SECONDS
                return None
            counts = {"problem": error.message[:MAX_PROBLEM]}
        self._audited_from.pop(key, None)
        return {"request": plan.audit, **counts}

    async def _delete(self, item: Object) -> None:
        metadata = item["metadata"]
        kind = KINDS[item.get("kind", EXPERIMENT.kind)]
        if await self._api.delete(kind, metadata["namespace"], metadata["name"], metadata["uid"]):
            log.info("%s/%s: deleted", metadata["namespace"], metadata["name"])

    # telling ---------------------------------------------------------------------------------------------------------

    async def _write_status(self, observed: Observed, status: Object) -> None:
        old, metadata = observed.status, observed.resource["metadata"]
        self._show(metadata, status["phase"])
        if old == status:
            return
        item = {
            "apiVersion": EXPERIMENT.api_version,
            "kind": EXPERIMENT.kind,
            # Of what is no longer as it was seen, the status may be wrong: the API server refuses it.
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            "status": status,
        }
        self.experiments.note(await self._api.apply(item, subresource="status"))
        if (change := event_of_change(old, status)) is not None:
            await self._event(observed, *change)

    async def _event(self, observed: Observed, kind: str, reason: str, note: str) -> None:
        try:
            await self._api.create(new_event(observed.resource, self._settings.pod_name, kind, reason, note))
        except (ApiError, aiohttp.ClientError, OSError) as error:
            log.info("event %s: %s", reason, error)  # an event is news, not state

    def _come_again(self, key: Key, observed: Observed, plan: Plan, status: Object) -> None:
        if plan.again_in is not None:
            self._queue.add_after(key, max(0.1, plan.again_in))
        seen = observed.seen
        if seen is not None and status.get("progress", {}).get("step") != seen.step:
            self._queue.add_after(key, PROGRESS_SECONDS)
        if plan.stage is Stage.RUN and self._settings.tls == "operator" and plan.again_in is None:
            self._queue.add_after(key, RENEW_SECONDS)

    def _show(self, metadata: Mapping[str, Any], phase: str) -> None:
        key = metadata["namespace"], metadata["name"]
        if (shown := self._shown.get(key)) == phase:
            return
        if shown is not None:
            PHASES.remove(*key, shown)
        PHASES.labels(*key, phase).set(1)
        self._shown[key] = phase

    async def _forget(self, key: Key) -> None:
        await self._followers.drop(key)
        self._queue.forget(key)
        self._audited_from.pop(key, None)
        self._identified.pop(key, None)
        if (shown := self._shown.pop(key, None)) is not None:
            PHASES.remove(*key, shown)

    # caches ----------------------------------------------------------------------------------------------------------

    def _note(self, item: Object) -> None:
        self.owned[KINDS[item["kind"]]].note(item)
        self._index(item)

    def _on_experiment(self, item: Object) -> None:
        self._queue.add((item["metadata"]["namespace"], item["metadata"]["name"]))

    def _on_child(self, item: Object) -> None:
        self._index(item)
        self._queue.add((item["metadata"]["namespace"], experiment_of(item)))

    def _index(self, item: Object) -> None:
        """By experiment: with many of them, nobody looks through the objects of all."""
        metadata = item["metadata"]
        key, child = (metadata["namespace"], experiment_of(item)), (item["kind"], metadata["name"])
        found = self.owned[KINDS[item["kind"]]].get(metadata["namespace"], metadata["name"])
        if found is not None:
            self._children.setdefault(key, {})[child] = found
            return
        children = self._children.get(key, {})
        children.pop(child, None)
        if not children:
            self._children.pop(key, None)


def _refusal(plan: Plan, error: NexrlError) -> tuple[str, str]:
    """Reason and message for what the API server, or we, refuse; raises the error again when it may pass."""
    reason = _reason(error)
    if reason is None:
        raise error
    # A quota may be wider by then, a Secret there; or a deadline is over.
    plan.again_in = min(REFUSED_SECONDS, plan.again_in or REFUSED_SECONDS)
    return reason, error.message


def _reason(error: NexrlError) -> str | None:
    """The reason for which an experiment is not accepted; None for an error that may pass."""
    if isinstance(error, NameTakenError):
        return "NameTaken"
    if isinstance(error, InvalidArgumentError):
        return "ConflictingPlacement"
    if not isinstance(error, ApiError):
        return "MissingPrerequisite"
    if error.code == 403:
        return "NotAllowed"
    # A value of another type is no error of the caller's, to the API server: it answers with 500.
    is_invalid = error.code in (400, 422) or any(words in error.message for words in _WRONG_TYPE)
    return "InvalidTemplate" if is_invalid else None


def _is_of_predecessor(item: Object, name: str) -> bool:
    """Whether its owner is an experiment of that name."""
    owners = item["metadata"].get("ownerReferences", [])
    return any((owner["kind"], owner["name"]) == (EXPERIMENT.kind, name) for owner in owners if owner.get("controller"))
