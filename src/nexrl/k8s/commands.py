"""The commands of `nexrl` for experiments on a cluster."""

import asyncio
import codecs
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from nexrl.components import BY_NAME
from nexrl.errors import (
    CheckFailedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NexrlError,
    NotFoundError,
    UnavailableError,
)
from nexrl.k8s.api import CONFIG_MAP, EXPERIMENT, POD, Api, ApiError, Object, connect_cluster
from nexrl.k8s.volume import MOUNT, volume_reader
from nexrl.log_files import prefix
from nexrl.results import described, new_folder, unpack
from nexrl.run_layout import CODE_FOLDER, EXPERIMENT_FILE
from nexrl.spec import parse_experiment
from nexrl.spec.bundle import bundle

MANAGER = "nexrl"
STATUS_FILE = "status.json"
"""Of the results of an experiment on a cluster: its status, which says how it ended."""
AUDIT_ANNOTATION = "nexrl.dev/audit"
WATCH_SECONDS = 300
RETRY_SECONDS = 1.0
SILENCE_SECONDS = 75.0
"""Longest silence of a watch before it is reopened. The API server sends a bookmark every minute."""
AUDIT_SECONDS = 120.0
SUSPEND_SECONDS = 3600.0
"""Longest time to write a checkpoint and stop, or to get nodes and load models."""
_ERRORS: Mapping[int, type[NexrlError]] = {400: InvalidArgumentError, 422: InvalidArgumentError, 404: NotFoundError}


@dataclass(frozen=True)
class Target:
    """An experiment on the cluster. Namespace "" is that of the kubeconfig's context."""

    name: str
    namespace: str = ""


def bundled(path: Path, overrides: Sequence[str]) -> Object:
    """Return the experiment at `path` with the Python modules beside it in spec.code. Raises SpecError."""
    document = bundle(path, overrides)
    parse_experiment(document, path.resolve().parent)  # reports all problems; the server reports only some
    return document


async def submit(document: Object, namespace: str) -> None:
    """Apply an experiment to the cluster."""
    async with _cluster(namespace) as (api, known):
        document["metadata"]["namespace"] = namespace or document["metadata"].get("namespace", known)
        applied = await api.apply(document, manager=MANAGER)
    metadata = applied["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    _print(f"experiment {name} in {namespace}: submitted; nexrl status {name} --namespace {namespace}")


async def print_status(target: Target) -> None:
    """Print phase, progress, conditions and pods."""
    async with _cluster(target.namespace) as (api, namespace):
        found = await _get(api, namespace, target.name)
        pods = (await api.list(POD, namespace, labelSelector=f"nexrl.dev/experiment={target.name}"))["items"]
    status = found.get("status", {})
    progress = status.get("progress", {})
    _print(f"{target.name}: {status.get('phase', 'no operator has seen it yet')}")
    if progress:
        values = ", ".join(f"{name} {progress[name]}" for name in ("reward", "staleness") if name in progress)
        version = progress["policyVersion"]
        _print(f"step {progress['step']}/{progress['totalSteps']}, policy version {version}{values and ', '}{values}")
    for condition in status.get("conditions", []):
        _print(f"{condition['type']:18} {condition['status']:7} {condition['reason']}: {condition['message']}")
    for pod in pods:
        containers = pod.get("status", {}).get("containerStatuses", [{}])
        _print(
            f"{pod['metadata']['name']:40} {pod['status']['phase']:10} restarts {containers[0].get('restartCount', 0)}"
        )
    _print_audit(status.get("audit"))


async def print_logs(target: Target, component: str, *, follows: bool) -> None:
    """Print the logs of a component's pods; once there are none, what the volume has kept.

    With several pods, each line begins with the name of its pod.
    """
    async with _cluster(target.namespace) as (api, namespace):
        beside = BY_NAME[component].beside if component in BY_NAME else ""
        labels = f"nexrl.dev/experiment={target.name},app.kubernetes.io/component={beside or component}"
        pods = [pod["metadata"]["name"] for pod in (await api.list(POD, namespace, labelSelector=labels))["items"]]
        if not pods:
            await _print_kept_logs(api, await _get(api, namespace, target.name), component)
            return
        query = {"container": component if beside else "nexrl", **({"follow": "true"} if follows else {})}

        async def copy(pod: str) -> None:
            try:
                async for line in api.text(POD.path(namespace, pod, "log"), query):
                    sys.stdout.write(prefix(pod, len(pods)) + line.decode(errors="replace"))
            except ApiError as error:  # the pod is being created or was deleted; print the others
                _print(f"{pod}: no log: {error.message}")

        await asyncio.gather(*map(copy, pods))


async def _print_kept_logs(api: Api, experiment: Object, component: str) -> None:
    """Print the logs on the volume. Raises NotFoundError if it has none of the component."""
    name = experiment["metadata"]["name"]
    decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), False
    async with volume_reader(api, experiment) as run_module:
        async for content in run_module("nexrl.log_files", MOUNT, component):
            sys.stdout.write(decoder.decode(content))
            found = True
    if not found:
        raise NotFoundError(
            f"{name}: there are no pods of {component!r}, and the volume has no logs of it; it keeps logs of all "
            "components but the data reader with storage.accessMode: ReadWriteMany, otherwise only of the trainer"
        )


async def get_results(target: Target, folder: Path, *, everything: bool) -> None:
    """Fetch the results of an experiment from its volume to `folder`, with its configuration and status.

    Raises AlreadyExistsError if `folder` exists, FailedPreconditionError if there is no volume, and
    DeadlineExceededError if the pod that reads it does not start.
    """
    async with _cluster(target.namespace) as (api, namespace):
        experiment = await _get(api, namespace, target.name)
        configuration = await api.get(CONFIG_MAP, namespace, f"{target.name}-experiment")
        with new_folder(folder) as partial:
            _write_configuration(partial, configuration or {})
            (partial / STATUS_FILE).write_text(json.dumps(experiment.get("status", {}), indent=2) + "\n")
            async with volume_reader(api, experiment) as run_module:
                await unpack(run_module("nexrl.results", MOUNT, *(["--all"] if everything else [])), partial)
    _print(f"{target.name}: {described(folder)} in {folder}")
    if (path := experiment["spec"].get("checkpoint", {}).get("path")) is not None:
        _print(f"its checkpoints are not on its volume, but in {path} of its pods (checkpoint.path)")


def _write_configuration(folder: Path, configuration: Object) -> None:
    """Write the resolved experiment and its modules as `nexrl run` does."""
    for name, content in configuration.get("data", {}).items():
        path = folder / name if name == EXPERIMENT_FILE else folder / CODE_FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)


async def suspend(target: Target) -> None:
    """Suspend an experiment, print the progress, and wait until all pods are gone.

    Raises FailedPreconditionError if the experiment has succeeded, and DeadlineExceededError after SUSPEND_SECONDS.
    """
    async with _cluster(target.namespace) as (api, namespace):
        await _suspend(api, namespace, target.name, is_suspended=True)
    _print(f"{target.name}: suspended; continue with nexrl resume {target.name}")


async def resume(target: Target) -> None:
    """Resume an experiment that is suspended or has failed, print the progress, and wait until it trains.

    Raises FailedPreconditionError if the experiment ends, and DeadlineExceededError after SUSPEND_SECONDS.
    """
    async with _cluster(target.namespace) as (api, namespace):
        found = await _get(api, namespace, target.name)
        if found.get("status", {}).get("phase") == "Failed":  # a suspension takes it out of this phase
            await _suspend(api, namespace, target.name, is_suspended=True)
        await _suspend(api, namespace, target.name, is_suspended=False)
    _print(f"{target.name}: running again")


async def _suspend(api: Api, namespace: str, name: str, *, is_suspended: bool) -> None:
    """Set spec.suspend, and wait until it has taken effect."""
    await api.merge(EXPERIMENT, namespace, name, {"spec": {"suspend": is_suspended}})
    wanted = "Suspended" if is_suspended else "Running"
    ends = wanted, "Succeeded", "Failed"
    why = f"not {wanted} within {SUSPEND_SECONDS:g} s; the operator continues"
    async with _time_limit(SUSPEND_SECONDS, f"{name}: {why}"):
        status = await _wait_for_status(api, namespace, name, lambda status: status.get("phase") in ends, _print)
    if status["phase"] != wanted:
        reasons = [
            f"{each['reason']}: {each['message']}" for each in status.get("conditions", []) if each["type"] == "Failed"
        ]
        raise FailedPreconditionError(f"{name}: it has ended ({', '.join([status['phase'], *reasons])})")


async def delete(target: Target) -> None:
    """Delete the experiment, its pods and its volume."""
    async with _cluster(target.namespace) as (api, namespace):
        found = await _get(api, namespace, target.name)
        await api.delete(EXPERIMENT, namespace, target.name, found["metadata"]["uid"])
    _print(f"{target.name}: deleted, with its volume")


async def print_audit(target: Target) -> None:
    """Print an audit of the ledger: a new one, or the last one if training has ended.

    Raises CheckFailedError if the ledger does not balance, and FailedPreconditionError if there is no audit.
    """
    async with _cluster(target.namespace) as (api, namespace):
        found = await _get(api, namespace, target.name)
        audit = found.get("status", {}).get("audit")
        if found.get("status", {}).get("phase") in ("Running", "Starting", "Restarting"):
            audit = await _ask_audit(api, namespace, target.name)
    if not audit or "problem" in audit:
        why = audit["problem"] if audit else "its trajectory pool is not running, and it has not ended"
        raise FailedPreconditionError(f"{target.name}: the ledger was not audited: {why}")
    _print_audit(audit)
    if audit["findings"]:
        raise CheckFailedError(f"the ledger does not balance: {audit['findings']} findings")


async def _ask_audit(api: Api, namespace: str, name: str) -> Mapping[str, Any]:
    request = uuid.uuid4().hex
    await api.merge(EXPERIMENT, namespace, name, {"metadata": {"annotations": {AUDIT_ANNOTATION: request}}})
    async with _time_limit(AUDIT_SECONDS, f"{name}: no operator audited the ledger within {AUDIT_SECONDS:g} s"):
        status = await _wait_for_status(
            api, namespace, name, lambda status: status.get("audit", {}).get("request") in (request, "final")
        )
    found: Mapping[str, Any] = status["audit"]
    return found


@asynccontextmanager
async def _time_limit(seconds: float, why: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceededError(why) from None


async def _wait_for_status(
    api: Api,
    namespace: str,
    name: str,
    fact: Callable[[Mapping[str, Any]], bool],
    report: Callable[[str], None] = lambda _: None,
) -> Mapping[str, Any]:
    """Wait until `fact` holds for the status of the experiment, and return it. Passes progress messages to `report`."""
    last_message = ""
    async for event, item in _watch_experiment(api, namespace, name):
        if event == "DELETED":
            raise NotFoundError(f"{name}: it was deleted")
        if _is_current(item) and fact(item["status"]):
            return dict(item["status"])
        message = _progress_message(item)
        if event != "BOOKMARK" and message != last_message:
            report(f"{name}: {message}")
            last_message = message
    raise AssertionError("a watch has no end")


def _progress_message(item: Object) -> str:
    if not _is_current(item):
        return "no operator has seen the change yet"
    ready = [each["message"] for each in item["status"].get("conditions", []) if each["type"] == "Ready"]
    return ": ".join([item["status"]["phase"], *filter(None, ready)])


async def _watch_experiment(api: Api, namespace: str, name: str) -> AsyncIterator[tuple[str, Object]]:
    """Yield the experiment, and then each change of it, for ever."""
    query = {"fieldSelector": f"metadata.name={name}", "timeoutSeconds": WATCH_SECONDS}
    while True:
        try:
            async for change in api.watch(EXPERIMENT, namespace, silence_seconds=SILENCE_SECONDS, **query):
                yield change
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(RETRY_SECONDS)


def _is_current(item: Object) -> bool:
    """Return whether the status belongs to the current spec. A bookmark has no status."""
    generation = item["metadata"].get("generation", 0)
    return "status" in item and bool(item["status"].get("observedGeneration", 0) >= generation)


async def _get(api: Api, namespace: str, name: str) -> Object:
    found = await api.get(EXPERIMENT, namespace, name)
    if found is None:
        raise NotFoundError(f"{name}: no such experiment in {namespace}")
    return found


def _print_audit(audit: Mapping[str, Any] | None) -> None:
    if audit and "findings" in audit:
        _print(
            f"granted {audit['granted']} = trained {audit['trained']} + dropped {audit['dropped']} + in flight "
            f"{audit['inFlight']}; "
            + (
                "every sample is accounted for exactly once"
                if not audit["findings"]
                else f"{audit['findings']} records break the balance"
            )
        )


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


@asynccontextmanager
async def _cluster(namespace: str) -> AsyncIterator[tuple[Api, str]]:
    """Open a connection, and return it with the namespace. Errors of the server become typed errors."""
    try:
        async with connect_cluster() as api:
            yield api, namespace or api.namespace
    except ApiError as error:
        raise _ERRORS.get(error.code, FailedPreconditionError)(error.message) from None
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise UnavailableError(f"the cluster cannot be reached: {str(error) or 'no answer in time'}") from None
