"""What an operator observes of one experiment, for tests of plan and status."""

from typing import Any

from nexrl.spec import parse_experiment
from nexrl_operator.api_objects import rfc3339
from nexrl_operator.children import Renderer
from nexrl_operator.objects import RUN_FOLDER, Owner
from nexrl_operator.observed import Observed, Seen
from tests.support.kubelet import experiment_object, operator_settings

Object = dict[str, Any]
NOW = 1_800_000_000.0
RUNNING = Seen("Running", "Training", "policy version 3 is committed", 3, 9, 3, {"reward_mean": 0.5})
ALL = ("controller", "inference", "rollout", "trainer", "trajectory-pool", "weight-sync")


def renderer(**sections: Any) -> Renderer:
    """Return the renderer of a small experiment; `sections` replaces sections of its spec."""
    experiment = parse_experiment(experiment_object("x", "rl", **sections), RUN_FOLDER)
    return Renderer(Owner("rl", "x", "uid-1"), experiment, operator_settings())


def observed(made: Renderer, *, running: tuple[str, ...] = ALL, seen: Seen | None = RUNNING, **status: Any) -> Observed:
    """Return the experiment with all its objects, and ready pods of the components that run."""
    metadata = {"name": "x", "namespace": "rl", "uid": "uid-1", "generation": 2}
    resource = {"metadata": metadata, "status": {"startTime": rfc3339(NOW - 100), **status}}
    workloads = [stored(item) for name, item in made.workloads(1).items() if name in running]
    pods = [pod(made, name) for name in running]
    return Observed(resource, [*made.foundation(), *workloads], pods, seen, NOW)


def stored(item: Object) -> Object:
    """Return an object as the API server stores it."""
    item["metadata"]["uid"] = f"uid-{item['metadata']['name']}"
    return item


def pod(made: Renderer, component: str, **status: Any) -> Object:
    """Return a ready pod of a component; `status` replaces parts of its status."""
    known = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], **status}
    labels = dict(made.owner.selector(component))
    if component == "trainer":
        labels["batch.kubernetes.io/job-name"] = "x-trainer-1"
    metadata = {"name": f"x-{component}-0", "uid": f"uid-{component}", "labels": labels}
    return {"kind": "Pod", "metadata": metadata, "status": known}


def condition(status: Object, kind: str) -> Object:
    """Return the condition of type `kind` in a status."""
    return next(each for each in status["conditions"] if each["type"] == kind)
