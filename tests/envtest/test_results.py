"""`nexrl get results` and `nexrl logs` after the end: the volume is read through a pod that does not stay."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from nexrl.k8s import commands, volume
from nexrl.k8s.api import CLAIM, CONFIG_MAP, EXPERIMENT, POD, Api
from nexrl.k8s.commands import Target
from tests.support.kubelet import experiment_object
from tests.support.node import Node, played_node
from tests.support.patience import eventually
from tests.support.results import filled_run, names_in

TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
NODES = {"pool": "gpu"}
RESULTS = {
    **{"claim": "done-run", "image": "test/control:1", "serviceAccountName": "pods"},
    **{"nodeSelector": NODES, "tolerations": TOLERATIONS},
}


@pytest.fixture
async def node(api: Api, namespace: str, tmp_path: Path) -> AsyncIterator[Node]:
    """A node whose volume has a run; the experiment `done` has ended."""
    await api.create(experiment_object("done", namespace))
    status = {"phase": "Succeeded", "results": RESULTS}
    path = EXPERIMENT.path(namespace, "done", "status")
    await api.request("PATCH", path, body={"status": status}, content_type="application/merge-patch+json")
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    await api.request("POST", CLAIM.path(namespace), body={"metadata": {"name": "done-run"}, "spec": spec})
    data = {"experiment.yaml": "kind: Experiment\n", "rewards.py": "ONE = 1\n"}
    await api.request("POST", CONFIG_MAP.path(namespace), body={"metadata": {"name": "done-experiment"}, "data": data})
    async with played_node(api, namespace, tmp_path) as node:
        filled_run(node.volume)
        yield node


async def pods(api: Api, namespace: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await api.list(POD, namespace))["items"]
    return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]


async def test_results_of_an_ended_experiment_are_fetched_and_the_pod_is_deleted(
    api: Api, namespace: str, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, folder = Target("done", namespace), tmp_path / "taken"
    await commands.get_results(target, folder, everything=False)
    assert names_in(folder) == names_in(node.volume, newest_only=True) | {
        "status.json",
        "experiment.yaml",
        "code/rewards.py",
    }
    for name in names_in(node.volume, newest_only=True):
        assert (folder / name).read_bytes() == (node.volume / name).read_bytes()
    assert json.loads((folder / "status.json").read_text())["phase"] == "Succeeded"
    assert "checkpoint of step 10 in " in capsys.readouterr().out
    assert not await pods(api, namespace)
    await commands.get_results(target, tmp_path / "all", everything=True)
    assert names_in(tmp_path / "all") >= names_in(node.volume)
    with pytest.raises(AlreadyExistsError, match=r"taken exists; choose another folder"):
        await commands.get_results(target, folder, everything=False)


async def test_the_pod_is_restricted_reads_only_and_ends_by_itself(
    api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    await commands.get_results(Target("done", namespace), tmp_path / "taken", everything=False)
    (pod,) = node.pods
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert mount == {"name": "run", "mountPath": "/volume", "readOnly": True}
    assert spec["volumes"] == [{"name": "run", "persistentVolumeClaim": {"claimName": "done-run"}}]
    assert (container["image"], spec["serviceAccountName"]) == ("test/control:1", "pods")
    assert spec["activeDeadlineSeconds"] == 4 * 3600
    assert spec["automountServiceAccountToken"] is False
    assert all(each in spec["tolerations"] for each in TOLERATIONS)
    [preferred] = spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"] == [{"key": "pool", "operator": "In", "values": ["gpu"]}]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert [owner["name"] for owner in pod["metadata"]["ownerReferences"]] == ["done"]


async def test_logs_are_printed_after_the_end(
    api: Api, namespace: str, node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target("done", namespace)
    await commands.print_logs(target, "trainer", follows=False)
    assert capsys.readouterr().out == "older\ntrained\n"
    with pytest.raises(NotFoundError, match=r"no pods of 'rollout'.*ReadWriteMany, otherwise only of the trainer"):
        await commands.print_logs(target, "rollout", follows=False)
    assert not await pods(api, namespace)


async def test_results_without_a_volume_are_refused(api: Api, namespace: str, tmp_path: Path) -> None:
    await api.create(experiment_object("new", namespace))
    with pytest.raises(FailedPreconditionError, match="new: it has no volume: no operator has started it, or its"):
        await commands.get_results(Target("new", namespace), tmp_path / "taken", everything=False)
    assert not (tmp_path / "taken").exists()


async def test_a_pod_that_does_not_start_is_deleted_and_named(
    api: Api, namespace: str, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume, "START_SECONDS", 2.0)
    node.waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    with pytest.raises(DeadlineExceededError, match=r"within 2 s: ImagePullBackOff: no such image"):
        await commands.get_results(Target("done", namespace), tmp_path / "taken", everything=False)
    assert not await pods(api, namespace)
    assert not (tmp_path / "taken").exists()


async def test_a_connection_that_is_cut_off_leaves_no_half_results(
    api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    node.cuts_off = True
    with pytest.raises(UnavailableError, match="cut off"):
        await commands.get_results(Target("done", namespace), tmp_path / "taken", everything=False)
    assert not await pods(api, namespace)
    assert not (tmp_path / "taken").exists()


async def test_a_command_that_is_interrupted_deletes_its_pod(
    api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    node.waiting = {"reason": "ContainerCreating"}
    target, folder = Target("done", namespace), tmp_path / "taken"
    fetching = asyncio.create_task(commands.get_results(target, folder, everything=False))

    async def is_made() -> bool:
        return bool(node.pods)

    await eventually(is_made)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert not await pods(api, namespace)
