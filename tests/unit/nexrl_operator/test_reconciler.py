"""Experiments that the operator cannot create, and names that are taken: no other experiment is affected."""

import base64
import importlib
from pathlib import Path
from typing import Any, cast

import pytest

import nexrl.k8s
from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.k8s.api import Api, Kind
from nexrl.spec import SpecError, parse_experiment
from nexrl_operator import reconciler as reconciler_module
from nexrl_operator.authority import new_ca
from nexrl_operator.children import Renderer
from nexrl_operator.credentials import Credentials
from nexrl_operator.effective_spec import effective_renderer
from nexrl_operator.experiment_clients import ExperimentClients
from nexrl_operator.object_names import NameTakenError, require_free_names
from nexrl_operator.objects import RUN_FOLDER, Owner
from nexrl_operator.observed import Observed
from nexrl_operator.reconciler import Reconciler
from nexrl_operator.settings import OperatorSettings
from nexrl_operator.work_queue import WorkQueue
from tests.support.kubelet import experiment_object, operator_settings

Object = dict[str, Any]
OWN = Owner("rl", "x", "uid-1")


class FakeApi:
    """An API server that only returns these objects."""

    def __init__(self, *items: Object) -> None:
        self._items = {(item["kind"], item["metadata"]["name"]): item for item in items}

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._items.get((kind.kind, name))


class NoClients:
    """No controller is connected."""

    def seen(self, key: object) -> None:
        return None


def api(*items: Object) -> Api:
    return cast("Api", FakeApi(*items))


def reconciler(tmp_path: Path) -> Reconciler:
    settings = operator_settings()
    clients = cast("ExperimentClients", NoClients())
    return Reconciler(api(), settings, WorkQueue(), clients, Credentials(api(), settings, tmp_path))


def resource(**metadata: Any) -> Object:
    made = experiment_object("x", "rl")
    return made | {"metadata": {**made["metadata"], "uid": OWN.uid, "resourceVersion": "1", **metadata}}


def secret(*owners: Object) -> Object:
    return {"kind": "Secret", "metadata": {"name": "x-tls", "namespace": "rl", "ownerReferences": list(owners)}}


async def test_one_that_cannot_be_worked_on_is_tried_again_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = reconciler(tmp_path)
    made.caches.experiments.note(resource() | {"spec": None})
    assert not await made.reconcile(("rl", "x"))
    assert "Traceback" in caplog.text
    made.close()


async def test_an_experiment_is_rendered_again_only_when_what_it_is_made_from_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderings: list[Object] = []

    def counted(observed: Observed, settings: OperatorSettings) -> tuple[Renderer, str]:
        renderings.append(observed.resource["spec"])
        return effective_renderer(observed, settings)

    monkeypatch.setattr(reconciler_module, "effective_renderer", counted)
    made, changed = reconciler(tmp_path), {**experiment_object("x", "rl", trainer={"steps": 9})["spec"]}
    for version, spec in enumerate([resource()["spec"], resource()["spec"], changed, changed], start=1):
        known = resource(resourceVersion=str(version), generation=1) | {"spec": spec, "status": {"restarts": version}}
        made.caches.experiments.note(known)
        await made.reconcile(("rl", "x"))
    assert renderings == [resource()["spec"], changed]
    made.close()


def test_annotations_of_any_length_are_ignored() -> None:
    long = resource(annotations={"kubectl.kubernetes.io/last-applied-configuration": "x" * 5000})
    renderer, problem = effective_renderer(Observed(long, [], [], None, 0.0), operator_settings())
    assert (renderer.experiment.metadata.name, problem) == ("x", "")


async def test_cert_manager_does_not_overwrite_the_secret_of_someone_else() -> None:
    certificate = {"kind": "Certificate", "metadata": {"name": "x-tls", "namespace": "rl"}}
    certificate |= {"spec": {"secretName": "x-tls"}}
    observed, its_own = Observed(resource(), [], [], None, 0.0), secret()
    its_own["metadata"]["annotations"] = {"cert-manager.io/certificate-name": "x-tls"}
    await require_free_names(api(its_own), observed, [certificate])
    with pytest.raises(NameTakenError, match="Secret x-tls"):
        await require_free_names(api(secret()), observed, [certificate])


async def test_an_object_of_another_owner_is_not_touched() -> None:
    observed, predecessor = Observed(resource(), [], [], None, 0.0), Owner("rl", "x", "uid-0").reference()

    async def judge(*items: Object) -> None:
        await require_free_names(api(*items), observed, [secret()])

    await judge()
    await judge(secret(OWN.reference()))
    for owner in ({}, {"controller": False}, {"kind": "Deployment"}):
        with pytest.raises(NameTakenError, match="Secret x-tls exists"):
            await judge(secret(*([OWN.reference() | {"uid": "uid-9"} | owner] if owner else [])))
    with pytest.raises(UnavailableError, match="deleted experiment"):
        await judge(secret(predecessor))


def test_a_home_that_is_none_is_a_violation_that_names_the_field() -> None:
    document = experiment_object("x", checkpoint={"path": "~nobody-of-this-name/x"})
    with pytest.raises(SpecError, match=r"spec\.checkpoint\.path"):
        parse_experiment(document, Path("/"))


def test_commands_say_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FailedPreconditionError, match=r"pip install -e .\.\[kubernetes\]"):
        importlib.reload(nexrl.k8s)
    monkeypatch.undo()
    importlib.reload(nexrl.k8s)


async def test_the_certificate_of_a_predecessor_is_not_good_enough(tmp_path: Path) -> None:
    settings, ca = operator_settings(tls="operator", ca_secret="ca"), new_ca()
    document = experiment_object("x", "rl", redis={"url": "redis://ours:6379"})
    files = encoded({"tls.crt": ca.certificate, "tls.key": ca.key})
    authority = {"kind": "Secret", "metadata": {"name": "ca"}, "data": files}
    experiment = parse_experiment(document, RUN_FOLDER)
    made = Renderer(OWN, experiment, settings)

    async def issued(*items: Object) -> list[Object]:
        credentials = Credentials(cast("Api", FakeApi(authority, *items)), settings, tmp_path)
        await credentials.begin()
        return await credentials.objects(made, is_running=False)

    [first] = await issued()
    assert await issued(first) == []
    owners = [OWN.reference() | {"uid": "uid-0"}]
    assert len(await issued(first | {"metadata": {**first["metadata"], "ownerReferences": owners}})) == 1


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}
