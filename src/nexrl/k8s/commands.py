"""The commands of `nexrl` for experiments on a cluster. Each does what one `kubectl` command does, and waits for it."""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from nexrl.errors import (
    CheckFailedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NexrlError,
    NotFoundError,
    UnavailableError,
)
from nexrl.k8s.api import EXPERIMENT, POD, Api, ApiError, Object, connect_cluster
from nexrl.spec import parse_experiment
from nexrl.spec.bundle import bundle

MANAGER = "nexrl"
AUDIT_ANNOTATION = "nexrl.dev/audit"
WATCH_SECONDS = 300
RETRY_SECONDS = 1.0
SILENCE_SECONDS = 75.0
"""A server sends bookmarks each minute."""
AUDIT_SECONDS = 120.0
SUSPEND_SECONDS = 3600.0
"""A checkpoint is written, or nodes and models are waited for."""
_ERRORS: Mapping[int, type[NexrlError]] = {400: InvalidArgumentError, 422: InvalidArgumentError, 404: NotFoundError}


@dataclass(frozen=True)
class Target:
    """An experiment of the cluster; namespace "" is that of the kubeconfig's context."""

    name: str
    namespace: str = ""


def bundled(path: Path, overrides: Sequence[str]) -> Object:
    """The experiment at `path` with the modules beside it in it. Raises SpecError."""
    document = bundle(path, overrides)
    parse_experiment(document, path.resolve().parent)  # every problem at once, where the server would stop at some
    return document


async def submit(document: Object, namespace: str) -> None:
    """Apply an experiment."""
    async with _cluster(namespace) as (api, known):
        document["metadata"]["namespace"] = namespace or document["metadata"].get("namespace", known)
        applied = await api.apply(document, manager=MANAGER)
    metadata = applied["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    _say(f"experiment {name} in {namespace}: submitted; nexrl status {name} --namespace {namespace}")


async def print_status(target: Target) -> None:
    """Phase, progress, conditions and pods."""
    async with _cluster(target.namespace) as (api, namespace):
        found = await _get(api, namespace, target.name)
        pods = (await api.list(POD, namespace, labelSelector=f"nexrl.dev/experiment={target.name}"))["items"]
    status = found.get("status", {})
    progress = status.get("progress", {})
    _say(f"{target.name}: {status.get('phase', 'not seen by an operator yet')}")
    if progress:
        values = ", ".join(f"{name} {progress[name]}" for name in ("reward", "staleness") if name in progress)
        version = progress["policyVersion"]
        _say(f"step {progress['step']}/{progress['totalSteps']}, policy version {version}{values and ', '}{values}")
    for condition in status.get("conditions", []):
        _say(f"{condition['type']:18} {condition['status']:7} {condition['reason']}: {condition['message']}")
    for pod in pods:
        containers = pod.get("status", {}).get("containerStatuses", [{}])
        _say(
            f"{pod['metadata']['name']:40} {pod['status']['phase']:10} restarts {containers[0].get('restartCount', 0)}"
        )
    _say_audit(status.get("audit"))


async def print_logs(target: Target, component: str, *, follows: bool) -> None:
    """The logs of the pods of a component, each line with its pod when there are several."""
    async with _cluster(target.namespace) as (api, namespace):
        labels = f"nexrl.dev/experiment={target.name},app.kubernetes.io/component={component}"
        pods = [pod["metadata"]["name"] for pod in (await api.list(POD, namespace, labelSelector=labels))["items"]]
        if not pods:
            raise NotFoundError(f"{target.name}: no pods of {component} in {namespace}")
        query = {"container": "nexrl", **({"follow": "true"} if follows else {})}

        async def copy(pod: str) -> None:
            try:
                async for line in api.text(POD.path(namespace, pod, "log"), query):
                    sys.stdout.write((f"{pod} " if len(pods) > 1 else "") + line.decode(errors="replace"))
            except ApiError as error:  # of one that is being created or is gone; the others have theirs
                _say(f"{pod}: no log: {error.message}")

        await asyncio.gather(*map(copy, pods))


async def suspend(target: Target, *, is_suspended: bool) -> None:
    """Set spec.suspend, and wait until no pod is left, or until it trains; tells how it gets on. Raises
    FailedPreconditionError when it is over, DeadlineExceededError."""
    async with _cluster(target.namespace) as (api, namespace):
        await api.merge(EXPERIMENT, namespace, target.name, {"spec": {"suspend": is_suspended}})
        wanted = "Suspended" if is_suspended else "Running"
        ends = wanted, "Succeeded", "Failed"
        why = f"not {wanted} within {SUSPEND_SECONDS:g} s; it goes on by itself"
        async with _limit(SUSPEND_SECONDS, f"{target.name}: {why}"):
            status = await _until(api, namespace, target.name, lambda status: status.get("phase") in ends, _say)
    if status["phase"] != wanted:
        told = [
            f"{each['reason']}: {each['message']}" for each in status.get("conditions", []) if each["type"] == "Failed"
        ]
        raise FailedPreconditionError(f"{target.name}: it is over ({', '.join([status['phase'], *told])})")
    _say(f"{target.name}: {'suspended; nexrl resume goes on' if is_suspended else 'running again'}")


async def delete(target: Target) -> None:
    """Delete the experiment, its pods and its volume."""
    async with _cluster(target.namespace) as (api, namespace):
        found = await _get(api, namespace, target.name)
        await api.delete(EXPERIMENT, namespace, target.name, found["metadata"]["uid"])
    _say(f"{target.name}: deleted, with its volume")


async def print_audit(target: Target) -> None:
    """Have the ledger counted, or tell how it was when training ended. Raises CheckFailedError when it is out of
    balance."""
    async with _cluster(target.namespace) as (api, namespace):
        found = await _get(api, namespace, target.name)
        audit = found.get("status", {}).get("audit")
        if found.get("status", {}).get("phase") in ("Running", "Starting", "Restarting"):
            audit = await _ask_audit(api, namespace, target.name)
    if not audit or "problem" in audit:
        why = audit["problem"] if audit else "its pool is not up, and it has not ended"
        raise FailedPreconditionError(f"{target.name}: the ledger was not counted: {why}")
    _say_audit(audit)
    if audit["findings"]:
        raise CheckFailedError(f"the ledger does not balance: {audit['findings']} findings")


async def _ask_audit(api: Api, namespace: str, name: str) -> Mapping[str, Any]:
    request = uuid.uuid4().hex
    await api.merge(EXPERIMENT, namespace, name, {"metadata": {"annotations": {AUDIT_ANNOTATION: request}}})
    async with _limit(AUDIT_SECONDS, f"{name}: no operator had the ledger counted within {AUDIT_SECONDS:g} s"):
        status = await _until(
            api, namespace, name, lambda status: status.get("audit", {}).get("request") in (request, "final")
        )
    found: Mapping[str, Any] = status["audit"]
    return found


@asynccontextmanager
async def _limit(seconds: float, why: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceededError(why) from None


async def _until(
    api: Api,
    namespace: str,
    name: str,
    fact: Callable[[Mapping[str, Any]], bool],
    tell: Callable[[str], None] = lambda _: None,
) -> Mapping[str, Any]:
    """Follow the experiment until `fact` holds of its status; gives that. `tell` hears what it waits for."""
    told = ""
    async for event, item in _changes(api, namespace, name):
        if event == "DELETED":
            raise NotFoundError(f"{name}: it was deleted")
        if _is_current(item) and fact(item["status"]):
            return dict(item["status"])
        words = _in_words(item)
        if event != "BOOKMARK" and words != told:
            tell(f"{name}: {words}")
            told = words
    raise AssertionError("a watch has no end")


def _in_words(item: Object) -> str:
    if not _is_current(item):
        return "no operator has seen the change yet"
    ready = [each["message"] for each in item["status"].get("conditions", []) if each["type"] == "Ready"]
    return ": ".join([item["status"]["phase"], *filter(None, ready)])


async def _changes(api: Api, namespace: str, name: str) -> AsyncIterator[tuple[str, Object]]:
    """The experiment as it is, and each change of it, without end."""
    query = {"fieldSelector": f"metadata.name={name}", "timeoutSeconds": WATCH_SECONDS}
    while True:
        try:
            async for change in api.watch(EXPERIMENT, namespace, silence_seconds=SILENCE_SECONDS, **query):
                yield change
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(RETRY_SECONDS)


def _is_current(item: Object) -> bool:
    """Whether its status is about its spec as it is now; a bookmark has none."""
    generation = item["metadata"].get("generation", 0)
    return "status" in item and bool(item["status"].get("observedGeneration", 0) >= generation)


async def _get(api: Api, namespace: str, name: str) -> Object:
    found = await api.get(EXPERIMENT, namespace, name)
    if found is None:
        raise NotFoundError(f"{name}: no such experiment in {namespace}")
    return found


def _say_audit(audit: Mapping[str, Any] | None) -> None:
    if audit and "findings" in audit:
        _say(
            f"granted {audit['granted']} = trained {audit['trained']} + dropped {audit['dropped']} + in flight "
            f"{audit['inFlight']}; "
            + (
                "every sample is accounted for, once"
                if not audit["findings"]
                else f"{audit['findings']} records break the balance"
            )
        )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


@asynccontextmanager
async def _cluster(namespace: str) -> AsyncIterator[tuple[Api, str]]:
    """A connection and the namespace; what the server refuses becomes an error with an exit code of its own."""
    try:
        async with connect_cluster() as api:
            yield api, namespace or api.namespace
    except ApiError as error:
        raise _ERRORS.get(error.code, FailedPreconditionError)(error.message) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"the cluster cannot be reached: {str(error) or 'no answer in time'}") from None
