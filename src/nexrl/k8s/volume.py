"""Reads the volume of an experiment through a pod that lives as long as the reading."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from nexrl.errors import DeadlineExceededError, FailedPreconditionError
from nexrl.k8s.api import CLAIM, POD, Api, Object
from nexrl.k8s.security import CONTAINER_SECURITY, POD_SECURITY

RunModule = Callable[..., AsyncIterator[bytes]]

MOUNT = "/volume"
CONTAINER = "reader"
START_SECONDS = 180.0
"""Longest time until the pod is ready: its node may have to pull the image and attach the volume."""
LOOK_SECONDS = 0.5
LIFE_SECONDS = 4 * 3600
"""The pod ends by itself after this time, if the command that made it is killed. The volume can then be deleted."""


@asynccontextmanager
async def volume_reader(api: Api, experiment: Object) -> AsyncIterator[RunModule]:
    """Run a pod with the volume at MOUNT, read-only, and delete it in any case.

    Yields a function that runs a Python module in the pod and yields its output. Raises FailedPreconditionError if
    there is no volume, and DeadlineExceededError if the pod does not start within START_SECONDS.
    """
    metadata = experiment["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    results = experiment.get("status", {}).get("results")
    if not results or await api.get(CLAIM, namespace, results["claim"]) is None:
        raise FailedPreconditionError(
            f"{name}: it has no volume: no operator has started it, or its PersistentVolumeClaim was deleted"
        )
    pod = reader_pod(experiment, results, f"{name[:40]}-reader-{uuid.uuid4().hex[:6]}")
    pod_name = pod["metadata"]["name"]
    try:
        await api.create(pod)
        await _until_ready(api, namespace, pod_name)

        def run_module(*arguments: str) -> AsyncIterator[bytes]:
            return api.execute(namespace, pod_name, CONTAINER, ["python3", "-m", *arguments])

        yield run_module
    finally:
        await api.delete(POD, namespace, pod_name)


def reader_pod(experiment: Object, results: Object, pod_name: str) -> Object:
    """Return the pod. It belongs to the experiment, and is none of its components."""
    metadata = experiment["metadata"]
    owner = {key: experiment[key] for key in ("apiVersion", "kind")} | {key: metadata[key] for key in ("name", "uid")}
    spec: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "affinity": _affinity(metadata["name"], results.get("nodeSelector", {})),
        "containers": [
            {
                "name": CONTAINER,
                "image": results["image"],
                "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", str(LIFE_SECONDS)],
                "securityContext": CONTAINER_SECURITY,
                "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
                "volumeMounts": [{"name": "run", "mountPath": MOUNT, "readOnly": True}],
            }
        ],
        "volumes": [{"name": "run", "persistentVolumeClaim": {"claimName": results["claim"]}}],
    }
    if "tolerations" in results:  # so that it may run on the trainer's node
        spec["tolerations"] = results["tolerations"]
    if results.get("serviceAccountName"):  # it has the secrets for pulling the image
        spec["serviceAccountName"] = results["serviceAccountName"]
    about = {
        "name": pod_name,
        "namespace": metadata["namespace"],
        "labels": {"app.kubernetes.io/name": "nexrl", "app.kubernetes.io/component": "reader"},
        "ownerReferences": [owner],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def _affinity(name: str, node_labels: Mapping[str, str]) -> Object:
    """Return the preference for the trainer's node, which a ReadWriteOnce volume is bound to while there is a trainer.

    Without one, nodes with the same labels come first. This is no condition: they may be gone, and the scheduler knows
    where a volume can be mounted.
    """
    trainer = {"nexrl.dev/experiment": name, "app.kubernetes.io/component": "trainer"}
    beside = {"labelSelector": {"matchLabels": trainer}, "topologyKey": "kubernetes.io/hostname"}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    affinity: Object = {"podAffinity": {preferred: [{"weight": 100, "podAffinityTerm": beside}]}}
    if node_labels:
        alike = [{"key": key, "operator": "In", "values": [value]} for key, value in node_labels.items()]
        affinity["nodeAffinity"] = {preferred: [{"weight": 50, "preference": {"matchExpressions": alike}}]}
    return affinity


async def _until_ready(api: Api, namespace: str, name: str) -> None:
    why = "not scheduled yet"
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        status = (await api.get(POD, namespace, name) or {}).get("status", {"phase": "Failed"})
        why = _why_not_ready(status) or why
        if status["phase"] in ("Failed", "Succeeded"):
            raise FailedPreconditionError(f"the pod that reads the volume, {name}, has ended: {why}")
        if any(each["ready"] for each in status.get("containerStatuses", [])):
            return
        await asyncio.sleep(LOOK_SECONDS)
    raise DeadlineExceededError(
        f"the pod that reads the volume, {name}, did not start within {START_SECONDS:g} s: {why}"
    )


def _why_not_ready(status: dict[str, Any]) -> str:
    """Return why a pod does not run yet, as kubelet and scheduler say it; "" if they say nothing."""
    waiting = [each.get("state", {}).get("waiting") for each in status.get("containerStatuses", [])]
    conditions = [each for each in status.get("conditions", []) if each["status"] == "False"]
    found = [each for each in (*waiting, *conditions, status) if each and (each.get("message") or each.get("reason"))]
    return ": ".join(filter(None, (found[0].get("reason", ""), found[0].get("message", "")))) if found else ""
