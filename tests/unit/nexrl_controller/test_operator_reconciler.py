"""What the operator does with experiments that it cannot make: to each its own trouble, to the others none."""

import base64
import importlib
from pathlib import Path
from typing import Any, cast

import pytest

import nexrl.k8s
from nexrl.authority import new_ca
from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.k8s.api import Api, Kind
from nexrl.spec import SpecError, parse_experiment
from nexrl_controller.operator.children import RUN_FOLDER, Owner, Renderer
from nexrl_controller.operator.followers import Followers
from nexrl_controller.operator.identity import Identity
from nexrl_controller.operator.observed import Observed
from nexrl_controller.operator.reconciler import NameTakenError, Reconciler
from nexrl_controller.operator.work_queue import WorkQueue
from tests.support.kubelet import experiment_object, operator_settings

Object = dict[str, Any]
OWN = Owner("rl", "x", "uid-1")


class FakeApi:
    """Has some objects."""

    def __init__(self, *items: Object) -> None:
        self._items = {(item["kind"], item["metadata"]["name"]): item for item in items}

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._items.get((kind.kind, name))


class NoFollowers:
    """Nobody is followed."""

    def seen(self, key: object) -> None:
        return None


def reconciler(tmp_path: Path, *items: Object) -> Reconciler:
    api, settings = cast("Api", FakeApi(*items)), operator_settings()
    followers = cast("Followers", NoFollowers())
    return Reconciler(api, settings, WorkQueue(), followers, Identity(api, settings, tmp_path))


def resource(**metadata: Any) -> Object:
    made = experiment_object("x", "rl")
    return made | {"metadata": {**made["metadata"], "uid": OWN.uid, "resourceVersion": "1", **metadata}}


def secret(*owners: Object) -> Object:
    return {"kind": "Secret", "metadata": {"name": "x-tls", "namespace": "rl", "ownerReferences": list(owners)}}


async def test_one_that_cannot_be_worked_on_is_tried_again_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = reconciler(tmp_path)
    made.experiments.note(resource() | {"spec": None})
    assert not await made.reconcile(("rl", "x"))
    assert "Traceback" in caplog.text
    made.close()


def test_annotations_of_any_length_are_nobodys_business(tmp_path: Path) -> None:
    made = reconciler(tmp_path)
    long = resource(annotations={"kubectl.kubernetes.io/last-applied-configuration": "x" * 5000})
    assert made._obeyed(Observed(long, [], [], None, 0.0))[0].experiment.metadata.name == "x"
    made.close()


async def test_cert_manager_is_not_asked_to_write_over_a_secret(tmp_path: Path) -> None:
    certificate = {"kind": "Certificate", "metadata": {"name": "x-tls", "namespace": "rl"}}
    certificate |= {"spec": {"secretName": "x-tls"}}
    observed, its_own = Observed(resource(), [], [], None, 0.0), secret()
    its_own["metadata"]["annotations"] = {"cert-manager.io/certificate-name": "x-tls"}
    made = reconciler(tmp_path, its_own)
    await made._require_free(observed, [certificate])
    made.close()
    made = reconciler(tmp_path, secret())
    with pytest.raises(NameTakenError, match="Secret x-tls"):
        await made._require_free(observed, [certificate])
    made.close()


async def test_what_is_somebody_elses_is_not_touched(tmp_path: Path) -> None:
    observed, predecessor = Observed(resource(), [], [], None, 0.0), Owner("rl", "x", "uid-0").reference()

    async def judge(*items: Object) -> None:
        made = reconciler(tmp_path, *items)
        try:
            await made._require_free(observed, [secret()])
        finally:
            made.close()

    await judge()
    await judge(secret(OWN.reference()))
    for owner in ({}, {"controller": False}, {"kind": "Deployment"}):
        with pytest.raises(NameTakenError, match="Secret x-tls is there"):
            await judge(secret(*([OWN.reference() | {"uid": "uid-9"} | owner] if owner else [])))
    with pytest.raises(UnavailableError, match="not gone yet"):
        await judge(secret(predecessor))


def test_a_home_that_is_none_is_a_violation_that_names_the_field() -> None:
    document = experiment_object("x", checkpoint={"path": "~nobody-of-this-name/x"})
    with pytest.raises(SpecError, match=r"spec\.checkpoint\.path"):
        parse_experiment(document, Path("/"))


def test_commands_say_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FailedPreconditionError, match=r"nexrl\[kubernetes\]"):
        importlib.reload(nexrl.k8s)
    monkeypatch.undo()
    importlib.reload(nexrl.k8s)


async def test_the_certificate_of_a_predecessor_is_not_good_enough(tmp_path: Path) -> None:
    settings, ca = operator_settings(tls="operator", ca_secret="ca"), new_ca()
    files = encoded({"tls.crt": ca.certificate, "tls.key": ca.key})
    authority = {"kind": "Secret", "metadata": {"name": "ca"}, "data": files}
    experiment = parse_experiment(experiment_object("x", "rl"), RUN_FOLDER)
    made = Renderer(OWN, experiment, settings)

    async def issued(*items: Object) -> list[Object]:
        identity = Identity(cast("Api", FakeApi(authority, *items)), settings, tmp_path)
        await identity.begin()
        return await identity.objects(made)

    [first] = await issued()
    assert await issued(first) == []
    owners = [OWN.reference() | {"uid": "uid-0"}]
    assert len(await issued(first | {"metadata": {**first["metadata"], "ownerReferences": owners}})) == 1


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}
