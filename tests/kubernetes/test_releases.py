"""An uninstalled release leaves nothing behind."""

from tests.support.cluster import RESTRICTED, Namespace, eventually, fresh_namespace

KINDS = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,pvc,leases,poddisruptionbudgets"
OF_EVERY_NAMESPACE = {"kube-root-ca.crt", "default"}


def test_uninstalled_release_leaves_nothing_but_the_definition(namespace: Namespace) -> None:
    with fresh_namespace(RESTRICTED) as other:
        other.install("gone", "crds.enabled=false")
        other.test("gone")
        other.uninstall("gone")
        eventually(lambda: not _left(other), "nothing of the release is left")
    namespace.kubectl("get", "crd", "experiments.nexrl.dev")


def _left(namespace: Namespace) -> set[str]:
    return {item["metadata"]["name"] for item in namespace.list(KINDS)} - OF_EVERY_NAMESPACE
