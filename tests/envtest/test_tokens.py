"""Tokens of ServiceAccounts, issued and judged by a real API server."""

import asyncio
from pathlib import Path

import pytest
import yaml

from nexrl.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from nexrl.k8s.api import Api, ApiError, Object
from nexrl.rpc.admission import KubernetesApi, TokenReviews
from nexrl.tls import experiment_name

OURS, OTHERS = experiment_name("default", "ours"), experiment_name("default", "others")
RBAC = "rbac.authorization.k8s.io"


@pytest.fixture
async def cluster(api: Api, kubeconfig: Path, tmp_path: Path) -> KubernetesApi:
    """The API as a pod sees it whose ServiceAccount `judge` may review tokens, and nothing else."""
    for name in ("judge", "worker"):
        await _create(api, "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": name}})
    rules = [{"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}]
    await _create(api, f"/apis/{RBAC}/v1/clusterroles", {"metadata": {"name": "judge"}, "rules": rules})
    subjects = [{"kind": "ServiceAccount", "name": "judge", "namespace": "default"}]
    role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": "judge"}
    binding: Object = {"metadata": {"name": "judge"}, "subjects": subjects, "roleRef": role}
    await _create(api, f"/apis/{RBAC}/v1/clusterrolebindings", binding)
    (tmp_path / "token").write_text(await token(api, "judge"))
    (tmp_path / "ca.crt").write_bytes((kubeconfig.parent / "apiserver.crt").read_bytes())
    return KubernetesApi(_server(kubeconfig), tmp_path)


def _server(kubeconfig: Path) -> str:
    return str(yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


async def token(api: Api, account: str, *audiences: str, namespace: str = "default") -> str:
    """What the kubelet projects into a pod."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    found = await api.request("POST", path, body={"spec": {"audiences": list(audiences), "expirationSeconds": 600}})
    return str(found["status"]["token"])


async def test_a_token_for_the_experiment_is_good_and_others_are_not(api: Api, cluster: KubernetesApi) -> None:
    reviews = TokenReviews(OURS, cluster)
    good = await token(api, "worker", OURS)
    await asyncio.gather(*(reviews.admit(good) for _ in range(5)))
    await reviews.admit(await token(api, "worker", OTHERS, OURS))
    for audiences in ((OTHERS,), ()):
        with pytest.raises(PermissionDeniedError, match="the token is for"):
            await reviews.admit(await token(api, "worker", *audiences))
    header, payload, signature = good.split(".")
    with pytest.raises(UnauthenticatedError, match="the token is not valid"):
        await reviews.admit(f"{header}.{payload}.{signature[::-1]}")


async def test_a_token_of_another_namespace_is_refused_whatever_its_audience(api: Api, cluster: KubernetesApi) -> None:
    await _create(api, "/api/v1/namespaces", {"metadata": {"name": "elsewhere"}})
    await _create(api, "/api/v1/namespaces/elsewhere/serviceaccounts", {"metadata": {"name": "worker"}})
    chosen = await token(api, "worker", OURS, namespace="elsewhere")
    with pytest.raises(PermissionDeniedError, match="system:serviceaccount:elsewhere:worker"):
        await TokenReviews(OURS, cluster).admit(chosen)


async def test_who_may_not_review_tokens_says_so(api: Api, cluster: KubernetesApi) -> None:
    (cluster.account / "token").write_text(await token(api, "worker"))
    with pytest.raises(UnavailableError, match=r"cannot be reviewed.*403"):
        await TokenReviews(OURS, cluster).admit(await token(api, "worker", OURS))


async def _create(api: Api, path: str, body: Object) -> None:
    """Create it; the server lives longer than a test, so it may be there."""
    try:
        await api.request("POST", path, body=body)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
