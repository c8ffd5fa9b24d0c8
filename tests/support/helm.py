"""Renders the chart with HELM or the `helm` on the PATH, and with `helm3` if it is installed."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.patience import LIMIT_SECONDS

CHART = Path(__file__).parents[2] / "deploy/helm"
KUBERNETES = "1.36.0"
"""The Kubernetes version to render for. Without it, the Helm of some distributions assumes an old cluster."""

Object = dict[str, Any]

EVERYTHING: tuple[str, ...] = (
    "operator.allNamespaces=true",
    "operator.replicas=3",
    "operator.priorityClassName=high",
    "metrics.serviceMonitor.enabled=true",
    "metrics.podMonitor.enabled=true",
    "metrics.prometheusRule.enabled=true",
    "metrics.dashboards.enabled=true",
    "tls.mode=certManager",
    "tls.certManager.issuerRef.name=ours",
    "imagePullSecrets[0].name=registry",
    "commonLabels.team=rl",
    "kueue.enabled=true",
    "experimentResources.trainer.limits.memory=64Gi",
)
NOTHING: tuple[str, ...] = (
    "crds.enabled=false",
    "serviceAccount.create=false",
    "serviceAccount.name=ours",
    "rbac.create=false",
    "redis.enabled=false",
    "externalRedis.url=rediss://redis.example:6379",
    "tls.mode=off",
    "networkPolicy.enabled=false",
    "podDisruptionBudget.enabled=false",
    "podDisruptionBudget.experiments=false",
    "tests.enabled=false",
)
ENCRYPTED_BY_SECRET = ("tls.mode=secret", "tls.secretName=ours", "redis.existingSecret=password")
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "defaults": (),
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "own secrets": ENCRYPTED_BY_SECRET,
}


def helms() -> list[str]:
    """Return the programs of all installed Helm versions: one, or Helm 3 and Helm 4."""
    names = [os.environ.get("HELM", "helm"), "helm3"]
    return [name for name in dict.fromkeys(names) if shutil.which(name)]


def helm(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm and wait until it ends."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


def rendering(program: str, values: Sequence[str], release: str = "trial") -> subprocess.CompletedProcess[str]:
    """Run `helm template` with these values."""
    given = [part for value in values for part in ("--set", value)]
    return helm(program, "template", release, str(CHART), "--namespace", "rl", "--kube-version", KUBERNETES, *given)


@cache
def objects(values: tuple[str, ...], release: str = "trial") -> tuple[Object, ...]:
    """Return the objects that the chart renders from these values. Raises ValueError with Helm's output if it fails."""
    done = rendering(helms()[0], values, release)
    if done.returncode:
        raise ValueError(done.stderr)
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def of_kind(found: Sequence[Object], *kinds: str) -> list[Object]:
    """Return the objects of these kinds."""
    return [item for item in found if item["kind"] in kinds]


def pod_specs(found: Sequence[Object]) -> dict[str, Object]:
    """Return the spec of every pod, by kind and name of the object that creates the pod."""
    specs = {}
    for item in found:
        if item["kind"] == "Pod":
            specs[f"Pod/{item['metadata']['name']}"] = item["spec"]
        elif "template" in item.get("spec", {}):
            specs[f"{item['kind']}/{item['metadata']['name']}"] = item["spec"]["template"]["spec"]
    return specs


def containers(spec: Object) -> list[Object]:
    """Return all containers of a pod, init containers first."""
    return [*spec.get("initContainers", []), *spec["containers"]]
