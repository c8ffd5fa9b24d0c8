"""Copies of all experiments and of the objects that they own, kept current by watches."""

import time
from collections.abc import Callable

from nexrl.k8s.api import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    EXPERIMENT,
    JOB,
    KINDS,
    NETWORK_POLICY,
    POD,
    SERVICE,
    STATEFUL_SET,
    WORKLOAD,
)
from nexrl_operator.api_objects import experiment_of, is_made_here, owner_uid
from nexrl_operator.cache import Cache
from nexrl_operator.objects import EXPERIMENT_LABEL, Object
from nexrl_operator.observed import Observed, Seen
from nexrl_operator.settings import OperatorSettings
from nexrl_operator.work_queue import Key

OWNED = (CONFIG_MAP, CLAIM, SERVICE, NETWORK_POLICY, DEPLOYMENT, STATEFUL_SET, JOB, POD)


class Caches:
    """One cache for each kind. Calls `on_change` with the experiment to which a changed object belongs."""

    def __init__(self, settings: OperatorSettings, on_change: Callable[[Key], None]) -> None:
        self._on_change = on_change
        self.experiments = Cache(EXPERIMENT, settings.namespace, "", self._on_experiment)
        optional = {WORKLOAD: settings.kueue, DISRUPTION_BUDGET: settings.disruption_budgets}  # each needs a right
        owned = (*OWNED, *(kind for kind, is_used in optional.items() if is_used))
        self._owned = {kind: Cache(kind, settings.namespace, EXPERIMENT_LABEL, self._on_child) for kind in owned}
        self.warnings = Cache(EVENT, settings.namespace, "", self._on_warning, fields="type=Warning")
        self._warnings_by_uid: dict[str, dict[str, Object]] = {}
        """The warnings by the UID of the object that they are about, and their name."""
        self._children: dict[Key, dict[tuple[str, str], Object]] = {}
        """The objects by experiment. Without it, each reconciliation would search the objects of all experiments."""
        self._keys: dict[tuple[str, str, str], Key] = {}
        """The experiment of each object, by its kind, namespace and name. Somebody may change the label."""

    @property
    def all(self) -> list[Cache]:
        """The caches that must be filled and current; not the warnings, without which only causes are missing."""
        return [self.experiments, *self._owned.values()]

    def note(self, item: Object) -> None:
        """Store the object that the server returned for a write, because the watch delivers it later."""
        if item["kind"] == EXPERIMENT.kind:
            self.experiments.note(item)
            return
        self._owned[KINDS[item["kind"]]].note(item)
        self._index(item)

    def observe(self, key: Key, resource: Object, seen: Seen | None) -> Observed:
        """Return the experiment `resource`, its objects, and the last report of its controller."""
        uid = resource["metadata"]["uid"]
        items = [item for item in self._children.get(key, {}).values() if is_made_here(item)]
        pods = [item for item in items if item["kind"] == POD.kind]
        objects = [item for item in items if item["kind"] != POD.kind]
        children = [item for item in objects if owner_uid(item) == uid]
        # Objects with another owner belong to a deleted experiment of this name. The garbage collector removes them.
        has_predecessor = any(owner_uid(item) not in ("", uid) for item in objects)
        uids = [item["metadata"]["uid"] for item in (*children, *pods)]
        warnings = {uid: [*found.values()] for uid in uids if (found := self._warnings_by_uid.get(uid))}
        return Observed(resource, children, pods, seen, time.time(), has_predecessor=has_predecessor, warnings=warnings)

    def _on_experiment(self, item: Object) -> None:
        self._on_change((item["metadata"]["namespace"], item["metadata"]["name"]))

    def _on_child(self, item: Object) -> None:
        for key in self._index(item):
            self._on_change(key)

    def _on_warning(self, item: Object) -> None:
        metadata, about = item["metadata"], item["involvedObject"]
        namespace, name, uid = metadata["namespace"], metadata["name"], about.get("uid", "")
        warnings = self._warnings_by_uid.setdefault(uid, {})
        if self.warnings.get(namespace, name) is not None:
            warnings[name] = item
        else:
            warnings.pop(name, None)
        if not warnings:
            del self._warnings_by_uid[uid]
        kind = KINDS.get(about.get("kind", ""))
        owned = self._owned.get(kind) if kind else None
        found = owned.get(namespace, about.get("name", "")) if owned is not None else None
        if found is not None:
            self._on_change((namespace, experiment_of(found)))

    def _index(self, item: Object) -> set[Key]:
        """File the object under the experiment of its label. Returns the experiments that this concerns."""
        kind, namespace, name = item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]
        found = self._owned[KINDS[kind]].get(namespace, name)
        key = (namespace, experiment_of(found or item))
        before = self._keys.pop((kind, namespace, name), key)
        if found is None or before != key:
            self._remove(before, (kind, name))
        if found is not None:
            self._keys[kind, namespace, name] = key
            self._children.setdefault(key, {})[kind, name] = found
        return {before, key}

    def _remove(self, key: Key, child: tuple[str, str]) -> None:
        children = self._children.get(key, {})
        children.pop(child, None)
        if not children:
            self._children.pop(key, None)
