"""Experiments with changes, as documents for the API server."""

from typing import Any
from uuid import uuid4

from tests.support.kubelet import experiment_object

Object = dict[str, Any]


def document(**changes: Any) -> Object:
    """An experiment with changes by path, as rollout__replicas=2; ... takes a key away."""
    item = experiment_object(f"x-{uuid4().hex[:8]}")
    for path, value in changes.items():
        change(item["spec"], path, value)
    return item


def change(spec: Object, path: str, value: Any) -> None:
    """Set, or with ... take away, the value at a path such as rollout__replicas."""
    *parents, key = path.split("__")
    for parent in parents:
        spec = spec.setdefault(parent, {})
    if value is ...:
        spec.pop(key, None)
    else:
        spec[key] = value
