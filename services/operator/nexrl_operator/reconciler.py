"""Brings each experiment closer to its spec: observe, plan, execute, report the status."""

import logging
import time
from dataclasses import replace

import aiohttp
from prometheus_client import Counter, Histogram

from nexrl.components import BY_NAME
from nexrl.errors import NexrlError
from nexrl.k8s.api import Api, ApiError
from nexrl.spec import SpecError
from nexrl_operator.api_objects import is_deleted
from nexrl_operator.caches import Caches
from nexrl_operator.children import Renderer
from nexrl_operator.credentials import SECRETS_SECONDS, Credentials
from nexrl_operator.effective_spec import effective_renderer, rendering_inputs
from nexrl_operator.executor import Executor, Outcome, Reconciliation
from nexrl_operator.experiment_clients import ExperimentClients
from nexrl_operator.experiment_state import ExperimentState
from nexrl_operator.ledger_expiry import LedgerExpiry
from nexrl_operator.objects import Object, Owner
from nexrl_operator.observed import Observed
from nexrl_operator.plan import Stage, make_plan
from nexrl_operator.reporter import Reporter
from nexrl_operator.settings import OperatorSettings
from nexrl_operator.status import PROGRESS_SECONDS, new_status, rejected
from nexrl_operator.work_queue import Key, WorkQueue

log = logging.getLogger(__name__)

MANAGER = "nexrl.dev/experiment-controller"

RECONCILED = Counter("nexrl_operator_reconcile_total", "Reconciliations.", ["result"])
SECONDS = Histogram("nexrl_operator_reconcile_duration_seconds", "Time of one reconciliation.")


class Reconciler:
    """Reconciles one experiment at a time. Call `reconcile` again whenever anything about it has changed."""

    def __init__(
        self,
        api: Api,
        settings: OperatorSettings,
        queue: WorkQueue,
        clients: ExperimentClients,
        credentials: Credentials,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._clients = clients
        self._credentials = credentials
        self.caches = Caches(settings, queue.add)
        self._reporter = Reporter(api, self.caches, settings.pod_name)
        self._executor = Executor(api, self.caches, clients, credentials, self._reporter)
        self._ledger_expiry = LedgerExpiry(credentials)
        self._states: dict[Key, ExperimentState] = {}

    def close(self) -> None:
        """Stop the background tasks."""
        self._ledger_expiry.close()

    async def reconcile(self, key: Key) -> bool:
        """Bring one experiment closer to its spec; False if the caller must retry."""
        began = time.monotonic()
        try:
            await self._reconcile(key)
        except (NexrlError, aiohttp.ClientError, OSError) as error:
            is_conflict = isinstance(error, ApiError) and error.code in (404, 409)
            log.log(logging.INFO if is_conflict else logging.WARNING, "%s/%s: %s", *key, str(error) or repr(error))
            RECONCILED.labels("conflict" if is_conflict else "error").inc()
            return False
        except Exception:  # one experiment must not keep the operator from the others
            log.exception("%s/%s", *key)
            RECONCILED.labels("error").inc()
            return False
        finally:
            SECONDS.observe(time.monotonic() - began)
        RECONCILED.labels("success").inc()
        return True

    async def _reconcile(self, key: Key) -> None:
        resource = self.caches.experiments.get(*key)
        state = await self._state_of(key, resource)
        if resource is None or state is None:
            return
        if is_deleted(resource):
            await self._forget(key, state)
            return
        if resource["spec"].get("managedBy", MANAGER) != MANAGER:
            return
        observed = self.caches.observe(key, resource, self._clients.seen(key))
        try:
            renderer, problem = self._renderer(observed, state)
        except SpecError as error:
            await self._reporter.write_status(observed, rejected(observed, "InvalidSpec", error.message), state)
            return
        if renderer.experiment.spec.redis.url is None:
            state.ledger = renderer.owner.ledger
        plan = make_plan(observed, renderer)
        if problem:  # what runs is looked after and can be stopped, but nothing is changed
            plan = replace(plan, apply=(), scale=())
        current = Reconciliation(observed, renderer, plan, state)
        outcome = await self._executor.execute(current)
        verdict = outcome.verdict
        if problem:
            verdict = replace(verdict, accepted="InvalidSpec", accepted_message=problem)
        status = new_status(observed, renderer, verdict)
        await self._reporter.write_status(observed, status, state)
        self._requeue(current, outcome, status)
        self._set_ttl(current)
        if plan.stage is not Stage.RUN and not observed.living(*BY_NAME):
            self._credentials.forget_certificate(renderer.owner)

    def _renderer(self, observed: Observed, state: ExperimentState) -> tuple[Renderer, str]:
        """Return what `effective_renderer` does; the known renderer while nothing has changed that it is made from."""
        inputs = rendering_inputs(observed)
        if state.rendering is not None and state.rendering[0] == inputs:
            return state.rendering[1], ""
        renderer, problem = effective_renderer(observed, self._settings)
        state.rendering = None if problem else (inputs, renderer)
        return renderer, problem

    async def _state_of(self, key: Key, resource: Object | None) -> ExperimentState | None:
        """Return the state of the experiment; None if it is gone. Cleans up after another one of its name."""
        uid = resource["metadata"]["uid"] if resource is not None else ""
        state = self._states.get(key)
        if state is not None and state.uid != uid:
            await self._forget(key, state)
            del self._states[key]
            if state.ledger:
                self._ledger_expiry.forget(state.ledger)
        return self._states.setdefault(key, ExperimentState(uid)) if resource is not None else None

    async def _forget(self, key: Key, state: ExperimentState) -> None:
        """Drop everything about an experiment but its ledger, which expires when the experiment is gone."""
        await self._clients.drop(key)
        self._queue.forget(key)
        self._reporter.forget(key, state)
        self._credentials.forget_certificate(Owner(*key, state.uid))
        state.audit_failing_since, state.secrets_checked_at, state.secrets_renewed_at = None, 0.0, 0.0

    def _set_ttl(self, current: Reconciliation) -> None:
        """Have the keys expire once the experiment has ended and nothing of it writes any more; keep them otherwise."""
        state, redis, stage = current.state, current.renderer.experiment.spec.redis, current.plan.stage
        if redis.url is not None:
            return
        if stage is Stage.CLEAR and not current.observed.living(*BY_NAME):
            if not state.is_expiring and redis.ttl_seconds_after_finished is not None:
                state.is_expiring = True
                self._ledger_expiry.expire(state.ledger, redis.ttl_seconds_after_finished)
        elif stage in (Stage.QUEUE, Stage.PAUSE, Stage.RUN) and state.is_expiring is not False:
            state.is_expiring = False
            # One that had failed, and is resumed. Only a change of its spec can do that.
            if current.observed.resource["metadata"].get("generation", 0) > 1:
                self._ledger_expiry.keep(state.ledger)

    def _requeue(self, current: Reconciliation, outcome: Outcome, status: Object) -> None:
        """Look at the experiment again when time alone changes what to do."""
        delay_seconds, seen = outcome.requeue_after_seconds, current.observed.seen
        if delay_seconds is not None:
            self._queue.add_after(current.key, max(0.1, delay_seconds))
        if seen is not None and status.get("progress", {}).get("step") != seen.step:
            self._queue.add_after(current.key, PROGRESS_SECONDS)
        if current.plan.stage is Stage.RUN and self._credentials.kept(current.renderer):
            self._queue.add_after(current.key, SECRETS_SECONDS)
