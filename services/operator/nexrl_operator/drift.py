"""Puts back what somebody has changed by hand of the objects of a running experiment.

Whether an object has changed is the API server's answer: a dry run of applying it again. Only the API server knows its
defaults, the changes of admission webhooks, and which fields belong to other managers.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from nexrl.k8s.api import Api, ApiError
from nexrl_operator.caches import Caches
from nexrl_operator.experiment_state import ExperimentState, Restored
from nexrl_operator.objects import Object
from nexrl_operator.observed import Observed
from nexrl_operator.reporter import Reporter
from nexrl_operator.revisions import content, content_digest

log = logging.getLogger(__name__)

RESTORE_SECONDS = 60.0
"""Time after a restoration until the next one of the object. It doubles while another program insists on its change."""
MAX_RESTORE_SECONDS = 3600.0
MAX_PATHS = 5

Place = Callable[[Observed, Object], Awaitable[Object]]


class Drift:
    """Compares objects with what the operator applied, and applies them again if they differ."""

    def __init__(self, api: Api, caches: Caches, reporter: Reporter) -> None:
        self._api = api
        self._caches = caches
        self._reporter = reporter

    async def restore(
        self, observed: Observed, state: ExperimentState, rendered: Sequence[Object], place: Place
    ) -> float | None:
        """Restore the objects that differ from `rendered`. `place` adds the nodes that a queue has assigned.

        Returns the seconds after which to look again, if any.
        """
        delays = []
        for item in rendered:
            live, key = observed.find(item), _key(item)
            if live is None or state.verified.get(key) == content_digest(live):
                continue
            if (restored := state.restored.get(key)) and (remaining := restored.pause_until - observed.now) > 0:
                delays.append(remaining)
                continue
            try:
                await self._restore(observed, state, live, await place(observed, item))
            except ApiError as error:  # perhaps of a new admission policy: what runs continues
                log.info("%s %s: cannot be compared: %s", *key, error)
                delays.append(RESTORE_SECONDS)
        return min(delays, default=None)

    async def _restore(self, observed: Observed, state: ExperimentState, live: Object, item: Object) -> None:
        expected, key = await self._api.apply(item, dry_run=True), _key(item)
        if expected["metadata"].get("resourceVersion") != live["metadata"]["resourceVersion"]:
            return  # the watch is about to deliver a newer version, or the deletion
        if paths := list(changed_paths(content(live), content(expected))):
            expected = await self._api.apply(item)
            self._caches.note(expected)
            state.restored[key] = _restored(state.restored.get(key), observed.now)
            told = ", ".join(paths[:MAX_PATHS]) + (f" and {len(paths) - MAX_PATHS} more" * (len(paths) > MAX_PATHS))
            note = f"{key[0]} {key[1]} was changed by hand: {told}; put back. Change the experiment instead"
            await self._reporter.event(observed, "Warning", "DriftCorrected", note)
        state.verified[key] = content_digest(expected)


def _restored(last: Restored | None, now: float) -> Restored:
    """Return what to remember of a restoration at `now`."""
    pause_seconds = RESTORE_SECONDS
    if last and now < last.pause_until + last.pause_seconds:  # it did not stay restored for long
        pause_seconds = min(2 * last.pause_seconds, MAX_RESTORE_SECONDS)
    return Restored(now + pause_seconds, pause_seconds)


def changed_paths(live: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields that differ, such as `spec.template.spec.containers[nexrl].image`."""
    if isinstance(live, dict) and isinstance(expected, dict):
        for key in sorted(live.keys() | expected.keys()):
            yield from changed_paths(live.get(key), expected.get(key), f"{path}.{key}" if path else key)
    elif isinstance(live, list) and isinstance(expected, list) and len(live) == len(expected):
        for index, (left, right) in enumerate(zip(live, expected, strict=True)):
            name = right.get("name", index) if isinstance(right, dict) else index
            yield from changed_paths(left, right, f"{path}[{name}]")
    elif live != expected:
        yield path


def _key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]
