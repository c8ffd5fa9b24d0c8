"""The chart as Helm renders it: what it refuses, what it makes, and that it makes the same each time."""

from typing import Any

import kubernetes_validate
import pytest

from nexrl_controller.operator.settings import OperatorSettings
from tests.support.helm import (
    CHART,
    EVERYTHING,
    KUBERNETES,
    NOTHING,
    VARIANTS,
    containers,
    helm,
    helms,
    objects,
    of_kind,
    pod_specs,
    rendering,
)

pytestmark = pytest.mark.skipif(not helms(), reason="needs Helm: `helm` on the PATH, or HELM")

variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
programs = pytest.mark.parametrize("program", helms())
MONITORING = "monitoring.coreos.com/v1"
CERTIFICATES = "cert-manager.io/v1"


@programs
def test_lint_finds_nothing(program: str) -> None:
    done = helm(program, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@programs
@variants
def test_rendering_twice_gives_the_same(program: str, values: tuple[str, ...]) -> None:
    first, second = rendering(program, values), rendering(program, values)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


@variants
def test_every_object_is_valid(values: tuple[str, ...]) -> None:
    for item in objects(values):
        if item["apiVersion"] not in (MONITORING, CERTIFICATES):
            kubernetes_validate.validate(item, KUBERNETES.rpartition(".")[0], strict=True)


@programs
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("operator.replica=2", "replica"),
        ("tls.mode=mutual", "mode"),
        ("redis.persistence.size=lots", "size"),
        ("images.control.digest=sha256:12", "digest"),
        ("metrics.podMonitor.interval=often", "interval"),
        ("typo=1", "typo"),
    ],
)
def test_schema_refuses(program: str, value: str, named: str) -> None:
    done = rendering(program, [value])
    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("redis.enabled=false",), "externalRedis.url must name a Redis"),
        (("tls.mode=certManager",), "issuerRef.name must name an Issuer"),
        (("tls.mode=secret",), "tls.secretName must name a Secret"),
    ],
)
def test_what_is_missing_is_named(values: tuple[str, ...], message: str) -> None:
    done = rendering(helms()[0], values)
    assert done.returncode != 0
    assert message in done.stderr


def test_schema_knows_each_value() -> None:
    """Every key of values.yaml has a type: a key that the schema has not is refused by all of the above."""
    assert rendering(helms()[0], []).returncode == 0


@variants
def test_pods_are_restricted(values: tuple[str, ...]) -> None:
    for name, spec in pod_specs(objects(values)).items():
        security = spec["securityContext"]
        assert security["runAsNonRoot"], name
        assert security["runAsUser"] == 10001, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not spec.get("hostNetwork")
        for container in containers(spec):
            inner = container["securityContext"]
            assert inner["allowPrivilegeEscalation"] is False, name
            assert inner["readOnlyRootFilesystem"] is True, name
            assert inner["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name
            assert not container["image"].endswith(":latest"), name


@variants
def test_tokens_are_mounted_only_where_they_are_used(values: tuple[str, ...]) -> None:
    mounted = {name for name, spec in pod_specs(objects(values)).items() if spec["automountServiceAccountToken"]}
    assert mounted <= {"Deployment/trial-nexrl-operator", "Pod/trial-nexrl-test-operator"}


@variants
def test_rights_are_enumerated(values: tuple[str, ...]) -> None:
    for role in of_kind(objects(values), "Role", "ClusterRole"):
        for rule in role["rules"]:
            asked = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "*" not in asked, role["metadata"]["name"]
            assert not {"escalate", "bind", "impersonate"} & set(asked)
            if "secrets" in rule["resources"]:
                assert not {"list", "watch"} & set(rule["verbs"])


def test_rights_in_one_namespace_are_no_rights_in_others() -> None:
    roles = of_kind(objects(()), "ClusterRole")
    about = {resource for role in roles for rule in role["rules"] for resource in rule["resources"]}
    assert about == {"tokenreviews", "experiments", "experiments/status", "experiments/scale"}
    bound = {item["roleRef"]["name"] for item in of_kind(objects(()), "ClusterRoleBinding")}
    assert bound == {"trial-nexrl-rl-token-reviews"}


def test_two_releases_share_no_name_and_no_label() -> None:
    def names(release: str) -> set[tuple[str, str]]:
        found = objects(("crds.enabled=false",), release)
        return {(item["kind"], item["metadata"]["name"]) for item in found}

    def selector(release: str) -> Any:
        (operator,) = of_kind(objects((), release), "Deployment")
        return operator["spec"]["selector"]["matchLabels"]

    assert not names("one") & names("two")
    assert selector("one") != selector("two")


def test_definition_is_kept_unless_asked() -> None:
    (kept,) = of_kind(objects(()), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (dropped,) = of_kind(objects(("crds.keep=false",)), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in dropped["metadata"].get("annotations", {})
    assert not of_kind(objects(NOTHING), "CustomResourceDefinition")


def test_nothing_of_ours_is_a_custom_resource() -> None:
    """Its definition may not be there yet when Helm looks at all objects before it makes the first."""
    assert not of_kind(objects(EVERYTHING), "Experiment")


def test_budget_never_keeps_a_node_from_draining() -> None:
    assert not of_kind(objects(()), "PodDisruptionBudget")
    (budget,) = of_kind(objects(EVERYTHING), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1


def test_image_is_that_of_its_digest() -> None:
    digest = "sha256:" + "0" * 64
    values = (f"images.control.digest={digest}", "global.imageRegistry=mirror.example/rl")
    (operator,) = of_kind(objects(values), "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"mirror.example/rl/nexrl-control@{digest}"


def test_no_template_makes_a_secret() -> None:
    for values in VARIANTS.values():
        assert not of_kind(objects(values), "Secret")


def test_restart_is_for_a_reason() -> None:
    """Nothing that changes with each version of the chart is in a pod's labels."""
    for item in of_kind(objects(()), "Deployment", "StatefulSet"):
        assert "helm.sh/chart" not in item["spec"]["template"]["metadata"]["labels"]


@variants
def test_operator_is_told_what_it_asks_for(values: tuple[str, ...]) -> None:
    """The chart sets settings that exist, and all that have no default."""
    (operator,) = of_kind(objects(values), "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    prefix = "NEXRL_OPERATOR_"
    told = {item["name"].removeprefix(prefix).lower() for item in container["env"] if item["name"].startswith(prefix)}
    fields = OperatorSettings.model_fields
    assert told <= fields.keys()
    assert {name for name, field in fields.items() if field.is_required()} <= told
