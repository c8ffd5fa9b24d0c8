"""Access to the cluster of KUBECONFIG with the tools of a user: kubectl and Helm. Waits for conditions."""

import base64
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.support.helm import CHART, helms
from tests.support.patience import LIMIT_SECONDS, Patience, for_minutes

Object = dict[str, Any]
FactT = TypeVar("FactT")

WAIT = f"--timeout={LIMIT_SECONDS - 60:.0f}s"
"""The limit of a wait inside kubectl or helm. It ends before that of the command, so it says what it waited for."""
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


class CommandError(Exception):
    """A command failed. The message contains its output."""


def missing() -> str:
    """Return the reason why no cluster can be used; "" if one can be used."""
    if not os.environ.get("KUBECONFIG"):
        return "needs a cluster: KUBECONFIG is not set"
    if not shutil.which("kubectl") or not helms():
        return "needs kubectl and helm on the PATH"
    return ""


def command(*arguments: str, text: str | None = None) -> str:
    """Run a program; returns its output. Raises CommandError."""
    done = subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        raise CommandError(f"{' '.join(arguments)}: {done.stdout}{done.stderr}".strip())
    return done.stdout


def eventually(fact: Callable[[], FactT], what: str, patience: Patience = for_minutes) -> FactT:
    """Call `fact` until its result is neither empty nor a CommandError, and return the result."""
    return patience.eventually_blocking(fact, what, tolerated=(CommandError,))


class Namespace:
    """A namespace of the cluster."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl in this namespace."""
        return command("kubectl", "--namespace", self.name, *arguments, text=text)

    def get(self, kind: str, name: str) -> Object:
        """Return one object. Raises CommandError if it does not exist."""
        found: Object = json.loads(self.kubectl("get", kind, name, "--output", "json"))
        return found

    def list(self, kinds: str, selector: str = "") -> Sequence[Object]:
        """Return the objects of these kinds."""
        chosen = ["--selector", selector] if selector else []
        items: list[Object] = json.loads(self.kubectl("get", kinds, *chosen, "--output", "json"))["items"]
        return items

    def pods(self, selector: str) -> Sequence[Object]:
        """Return the pods that are not being deleted."""
        return [pod for pod in self.list("pods", selector) if "deletionTimestamp" not in pod["metadata"]]

    def addresses(self, selector: str) -> dict[str, str]:
        """Return host:port of every port that these running pods name, with its name: policies know no Services."""
        return {
            f"{pod['status']['podIP']}:{port['containerPort']}": port["name"]
            for pod in self.pods(selector)
            if pod["status"]["phase"] == "Running"
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
        }

    def secret(self, name: str) -> dict[str, bytes]:
        """Return what a Secret contains."""
        return {key: base64.b64decode(value) for key, value in self.get("secret", name)["data"].items()}

    def apply(self, item: Object | str) -> None:
        """Apply a manifest."""
        self.kubectl("apply", "--filename", "-", text=item if isinstance(item, str) else json.dumps(item))

    def install(self, release: str, *values: str) -> None:
        """Install or upgrade the chart, and wait until its pods are ready."""
        given = [part for value in values for part in ("--set", value)]
        wait = ["--wait", WAIT]
        self._helm("upgrade", "--install", release, str(CHART), *given, *wait)

    def test(self, release: str) -> None:
        """Run `helm test`."""
        self._helm("test", release, WAIT, "--logs")

    def uninstall(self, release: str) -> None:
        """Remove the release and wait until its objects are gone."""
        self._helm("uninstall", release, "--wait", WAIT)

    def _helm(self, *arguments: str) -> None:
        command(helms()[0], "--namespace", self.name, *arguments)

    def diagnosis(self) -> str:
        """Return the objects, events and logs that help to find the cause of a failure."""
        asked = [
            ["get", "experiments,pods,jobs,statefulsets,pvc", "--output", "wide"],
            ["get", "events", "--sort-by", ".lastTimestamp"],
            ["get", "experiments", "--output", "yaml"],
        ]
        names = [pod["metadata"]["name"] for pod in self.list("pods")]
        asked += [["logs", name, "--all-containers", "--tail", "30", "--prefix"] for name in names]
        return "\n\n".join(self._said(*arguments) for arguments in asked)

    def _said(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except CommandError as error:
            return str(error)


def condition(experiment: Object, kind: str) -> Object:
    """Return the condition of type `kind`; {} if the experiment does not have it."""
    found = experiment.get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == kind), {})


def is_true(experiment: Object, kind: str) -> bool:
    """Return whether the condition of type `kind` is True."""
    return condition(experiment, kind).get("status") == "True"


@contextmanager
def fresh_namespace(*labels: str) -> Iterator[Namespace]:
    """Create a namespace. It is deleted afterwards, with everything in it; nothing waits for that."""
    namespace = Namespace(f"nexrl-test-{uuid.uuid4().hex[:8]}")
    command("kubectl", "create", "namespace", namespace.name)
    if labels:
        command("kubectl", "label", "namespace", namespace.name, *labels)
    try:
        yield namespace
    finally:
        command("kubectl", "delete", "namespace", namespace.name, "--wait=false")
