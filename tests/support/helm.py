"""The chart, rendered: HELM or `helm` on the PATH, and `helm3` where it is there."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy/helm"
KUBERNETES = "1.36.0"
"""Rendered for: the Helm of some distributions takes itself for an old cluster."""
HELM_SECONDS = 60.0

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
    """Each Helm at hand: 3 and 4, if there are two."""
    names = [os.environ.get("HELM", "helm"), "helm3"]
    return [name for name in dict.fromkeys(names) if shutil.which(name)]


def helm(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm to its end."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=HELM_SECONDS, check=False)


def rendering(program: str, values: Sequence[str], release: str = "trial") -> subprocess.CompletedProcess[str]:
    """`helm template` with these values."""
    given = [part for value in values for part in ("--set", value)]
    return helm(program, "template", release, str(CHART), "--namespace", "rl", "--kube-version", KUBERNETES, *given)


@cache
def objects(values: tuple[str, ...], release: str = "trial") -> tuple[Object, ...]:
    """What the chart makes of these values. Raises what Helm says when it refuses."""
    done = rendering(helms()[0], values, release)
    if done.returncode:
        raise ValueError(done.stderr)
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def of_kind(found: Sequence[Object], *kinds: str) -> list[Object]:
    """Those of these kinds."""
    return [item for item in found if item["kind"] in kinds]


def pod_specs(found: Sequence[Object]) -> dict[str, Object]:
    """The spec of every pod, by kind and name of what makes it."""
    specs = {}
    for item in found:
        if item["kind"] == "Pod":
            specs[f"Pod/{item['metadata']['name']}"] = item["spec"]
        elif "template" in item.get("spec", {}):
            specs[f"{item['kind']}/{item['metadata']['name']}"] = item["spec"]["template"]["spec"]
    return specs


def containers(spec: Object) -> list[Object]:
    """All containers of a pod."""
    return [*spec.get("initContainers", []), *spec["containers"]]
