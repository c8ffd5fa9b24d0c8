"""Experiments on a cluster: apply them, follow them, and check their status."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster import Namespace, Object, command, eventually, is_true
from tests.support.patience import BASE_SECONDS, Patience, PatienceError, for_minutes

SORT_DIGITS = Path(__file__).parents[2] / "examples/sort-digits.yaml"
NEXRL = str(Path(sys.executable).with_name("nexrl"))
_LIVING = ("Pending", "Running")
for_a_run = Patience(15 * BASE_SECONDS)
"""For what takes a whole run of an experiment."""
FOREVER = 1_000_000
SLOW_REWARD = """

import time


def slow(task: Mapping[str, object], text: str, is_finished: bool) -> dict[str, float]:
    time.sleep(1)
    return reward(task, text, is_finished)
"""


def sort_digits(name: str, **changes: Any) -> Object:
    """Return the example under another name. `changes` are fields of the spec by path: trainer__steps=60."""
    item: Object = yaml.safe_load(SORT_DIGITS.read_text())
    item["metadata"]["name"] = name
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = item["spec"]
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return item


def slow(name: str, **changes: Any) -> Object:
    """Return the example with small batches and a slow reward. It leaves CPU time for other tests."""
    item = sort_digits(
        name,
        rollout__reward="sort_digits:slow",
        rollout__workers=32,
        trajectoryPool__batchSize=32,
        trajectoryPool__groupSize=8,
        **changes,
    )
    item["spec"]["code"]["sort_digits.py"] += SLOW_REWARD
    return item


class Running:
    """An experiment of the cluster."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace = namespace
        self.name = name

    @property
    def selector(self) -> str:
        """The labels of its objects."""
        return f"nexrl.dev/experiment={self.name}"

    def get(self) -> Object:
        """Return the current object."""
        return self.namespace.get("experiment", self.name)

    @property
    def step(self) -> int:
        """The number of optimizer steps in the status."""
        return int(self.get().get("status", {}).get("progress", {}).get("step", 0))

    def pods(self, component: str = "") -> dict[str, str]:
        """Return the names, by UID, of the experiment's pods that are not being deleted."""
        chosen = self.selector
        chosen += f",app.kubernetes.io/component={component}" if component else ""
        pods = [pod["metadata"] for pod in self.namespace.pods(chosen) if pod["status"]["phase"] in _LIVING]
        return {pod["uid"]: pod["name"] for pod in pods}

    def ready(self, component: str) -> int:
        """Return the number of ready pods of a component in the status."""
        components: list[Object] = self.get().get("status", {}).get("components", [])
        return next((int(item["ready"]) for item in components if item["name"] == component), 0)

    def has_other_pods(self, component: str, than: Collection[str]) -> bool:
        """Return whether a component has new pods: all are ready, and no UID is in `than`."""
        found = self.pods(component)
        return bool(found) and not found.keys() & set(than) and self.ready(component) == len(found)

    def until_it_goes_on(self) -> None:
        """Wait until the experiment has made one more step."""
        self.until_step(self.step + 1)

    def count(self) -> None:
        """Run `nexrl audit` during training. Raises CommandError if the ledger does not balance."""
        command(NEXRL, "audit", self.name, "--namespace", self.namespace.name)

    def until_step(self, step: int) -> None:
        """Wait until the experiment has made `step` steps."""
        self._until(lambda: self.step >= step, f"step {step}", for_minutes)

    def until(self, condition: str) -> Object:
        """Wait until a condition holds, and return the experiment. Raises AssertionError if the experiment fails."""
        self._until(lambda: is_true(self.get(), condition) or is_true(self.get(), "Failed"), condition, for_a_run)
        found = self.get()
        assert is_true(found, condition), self.namespace.diagnosis()
        return found

    def _until(self, fact: Any, what: str, patience: Patience) -> None:
        try:
            eventually(fact, f"{self.name}: {what}", patience)
        except PatienceError as error:
            raise AssertionError(f"{error}\n{self.namespace.diagnosis()}") from None


@contextmanager
def applied(namespace: Namespace, item: Object) -> Iterator[Running]:
    """Apply an experiment. Afterwards delete it, without waiting for its end: test_operations.py proves that."""
    name = item["metadata"]["name"]
    namespace.apply(item)
    running = Running(namespace, name)
    try:
        yield running
    finally:
        namespace.kubectl("delete", "experiment", name, "--ignore-not-found", "--wait=false")


def assert_balanced(experiment: Object) -> None:
    """Assert that every granted sample was trained or dropped, exactly once."""
    audit = experiment["status"]["audit"]
    assert audit["findings"] == 0
    assert audit["inFlight"] == 0
    assert audit["granted"] == audit["trained"] + audit["dropped"] > 0
