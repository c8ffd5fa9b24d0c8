"""One release of the chart for all tests of this folder, in a namespace that enforces `restricted`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import RESTRICTED, WAIT, Namespace, command, eventually, fresh_namespace, missing
from tests.support.experiments import FOREVER, Running, applied, slow

HERE = Path(__file__).parent
TEST_SECONDS = 1800
"""Only ends a hung test, after the waits for pods and runs in it would have ended."""
RELEASE = "nexrl"
OF_EXPERIMENTS = "pods,jobs,statefulsets,pvc,configmaps,secrets,networkpolicies"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of this folder, and skip it where there is no cluster."""
    why = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def namespace() -> Iterator[Namespace]:
    """Install the chart without any value. At the end, delete the definition and with it every experiment."""
    if command("kubectl", "get", "crd", "experiments.nexrl.dev", "--ignore-not-found"):
        pytest.fail(
            "this cluster has the definition of Experiment already: take one without NexRL, or `kubectl delete crd`"
        )
    with fresh_namespace(RESTRICTED) as found:
        found.install(RELEASE)
        yield found
        found.kubectl("delete", "experiments", "--all", WAIT)
        eventually(lambda: not found.list(OF_EXPERIMENTS, "nexrl.dev/experiment"), "deleted experiments left nothing")
        found.uninstall(RELEASE)
        command("kubectl", "delete", "crd", "experiments.nexrl.dev", "--ignore-not-found", WAIT)


@pytest.fixture(scope="package")
def running(namespace: Namespace) -> Iterator[Running]:
    """An experiment that trains, slowly, for as long as it is needed; each test leaves it training.

    It has no periodic checkpoints.
    """
    with applied(namespace, slow("running", trainer__steps=FOREVER, checkpoint__everySteps=FOREVER)) as found:
        found.until_step(1)
        yield found
