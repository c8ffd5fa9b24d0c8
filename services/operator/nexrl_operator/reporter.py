"""Reports on experiments: their status, Events, and the metric of their phase."""

import logging

import aiohttp
from prometheus_client import Gauge

from nexrl.k8s.api import EXPERIMENT, Api, ApiError
from nexrl_operator.caches import Caches
from nexrl_operator.events import event_of_change, new_event
from nexrl_operator.experiment_state import ExperimentState
from nexrl_operator.objects import Object
from nexrl_operator.observed import Observed
from nexrl_operator.work_queue import Key

log = logging.getLogger(__name__)

PHASES = Gauge(
    "nexrl_experiment_phase", "1 for the phase that an experiment is in.", ["namespace", "experiment", "phase"]
)


class Reporter:
    """Writes a status only when it has changed."""

    def __init__(self, api: Api, caches: Caches, pod_name: str) -> None:
        self._api = api
        self._caches = caches
        self._pod_name = pod_name

    async def write_status(self, observed: Observed, status: Object, state: ExperimentState) -> None:
        """Write the status if it has changed, with an Event if the change is news."""
        old, metadata = observed.status, observed.resource["metadata"]
        _show_phase((metadata["namespace"], metadata["name"]), state, status["phase"])
        if old == status:
            return
        item = {
            "apiVersion": EXPERIMENT.api_version,
            "kind": EXPERIMENT.kind,
            # With the resourceVersion: if the object has changed since it was observed, the API server refuses a status
            # that may be wrong.
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            "status": status,
        }
        self._caches.note(await self._api.apply(item, subresource="status"))
        if (change := event_of_change(old, status)) is not None:
            await self.event(observed, *change)

    async def event(self, observed: Observed, kind: str, reason: str, note: str) -> None:
        """Create an Event about the experiment; `kind` is Normal or Warning. A failure is only logged."""
        try:
            await self._api.create(new_event(observed.resource, self._pod_name, kind, reason, note))
        except (ApiError, aiohttp.ClientError, OSError) as error:
            log.info("event %s: %s", reason, error)

    def forget(self, key: Key, state: ExperimentState) -> None:
        """Remove the metric of an experiment that is being deleted."""
        _show_phase(key, state, "")


def _show_phase(key: Key, state: ExperimentState, phase: str) -> None:
    if state.shown_phase == phase:
        return
    if state.shown_phase:
        PHASES.remove(*key, state.shown_phase)
    if phase:
        PHASES.labels(*key, phase).set(1)
    state.shown_phase = phase
