"""The chart as Helm renders it: what it refuses, what it makes, and that it makes the same each time."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nexrl.tls import OPERATOR
from nexrl_operator.release_secrets import ReleaseSettings
from nexrl_operator.settings import OperatorSettings
from tests.support.helm import (
    CHART,
    EVERYTHING,
    KUBERNETES,
    NOTHING,
    VARIANTS,
    Object,
    containers,
    helm,
    helms,
    objects,
    of_kind,
    pod_specs,
    rendering,
)
from tests.support.patience import LIMIT_SECONDS

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
def test_names_that_look_like_numbers_stay_text(program: str) -> None:
    given = "redis.existingSecret=123,redis.secretKey=on,serviceAccount.name=123,redis.persistence.storageClassName=1"
    names = ("true", str(CHART), "--namespace", "123", "--set-string", given)
    done = helm(program, "template", *names, "--kube-version", KUBERNETES)
    assert done.returncode == 0, done.stderr
    for item in filter(None, yaml.safe_load_all(done.stdout)):
        kubernetes_validate.validate(item, KUBERNETES.rpartition(".")[0], strict=True)


@programs
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("operator.replica=2", "replica"),
        ("tls.mode=mutual", "mode"),
        ("redis.persistence.size=lots", "size"),
        ("images.control.digest=sha256:12", "digest"),
        ("networkPolicy.apiServerPorts={70000}", "apiServerPorts"),
        ("metrics.podMonitor.interval=often", "interval"),
        ("experimentResources.trainr.limits.memory=1Gi", "trainr"),
        ("experimentResources.trainer.limit.memory=1Gi", "limit"),
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
        (("externalRedis.url=redis://ours:6379",), "redis.enabled is true"),
        (("redis.enabled=false", "externalRedis.url=redis://us:secret@ours"), "externalRedis.url holds a password"),
        (("serviceAccount.create=false",), "serviceAccount.name must name one"),
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
    """Helm validates all objects before it creates the first, when the definition may not exist yet."""
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


def test_no_upgrade_restarts_redis() -> None:
    (redis,) = of_kind(objects(("images.tag=2.0.0",)), "StatefulSet")
    assert redis["spec"]["template"]["spec"]["containers"][0]["image"] == "localhost/nexrl-redis:7"


def test_build_calls_redis_as_the_chart_does() -> None:
    assert "image=$registry/nexrl-redis:7\n" in (CHART.parents[1] / "docker/build").read_text()


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
    prefix, known = "NEXRL_OPERATOR_", _environment(objects(values))
    told = {item["name"].removeprefix(prefix).lower() for item in known if item["name"].startswith(prefix)}
    fields = OperatorSettings.model_fields
    assert told <= fields.keys()
    assert {name for name, field in fields.items() if field.is_required()} <= told


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("redis://elsewhere", 6379),
        ("rediss://nexrl@redis.example:7000", 7000),
        ("redis+cluster://[fd00::1]:7001", 7001),
        ("redis://[fd00::1]", 6379),
    ],
)
def test_operator_and_experiments_reach_external_redis_and_the_api_server_alone(url: str, port: int) -> None:
    found = objects(("redis.enabled=false", f"externalRedis.url={url}", "networkPolicy.apiServerPorts={16443,443}"))
    (policy,) = of_kind(found, "NetworkPolicy")
    rules = [[each["port"] for each in rule["ports"]] for rule in policy["spec"]["egress"]]
    assert rules == [[53, 53], [16443, 443], [50051], [port]]
    (told,) = [item["value"] for item in _environment(found) if item["name"] == "NEXRL_OPERATOR_EGRESS"]
    assert [[each["port"] for each in rule["ports"]] for rule in json.loads(told)] == [[port], [16443, 443]]


def test_no_ports_are_not_all_ports() -> None:
    (policy,) = [
        item
        for item in of_kind(objects(("networkPolicy.apiServerPorts=null",)), "NetworkPolicy")
        if item["metadata"]["name"].endswith("-operator")
    ]
    assert all(rule["ports"] for rule in policy["spec"]["egress"])


def test_operator_is_told_the_resources_of_experiments() -> None:
    (told,) = [
        item["value"] for item in _environment(objects(EVERYTHING)) if item["name"] == "NEXRL_OPERATOR_RESOURCES"
    ]
    assert json.loads(told) == {"trainer": {"limits": {"memory": "64Gi"}}}
    assert "NEXRL_OPERATOR_RESOURCES" not in {item["name"] for item in _environment(objects(()))}


def test_pods_judge_no_tokens_without_the_right_to() -> None:
    without = _environment(objects(("rbac.tokenReviews=false",)))
    assert {"name": "NEXRL_OPERATOR_TOKEN_REVIEWS", "value": "false"} in without
    assert "NEXRL_OPERATOR_TOKEN_REVIEWS" not in {item["name"] for item in _environment(objects(()))}


def test_secrets_are_owned_by_what_nobody_makes_again() -> None:
    found = objects(())
    (operator,) = of_kind(found, "Deployment")
    (maker,) = operator["spec"]["template"]["spec"]["initContainers"]
    (owner,) = [item["value"] for item in maker["env"] if item["name"] == "NEXRL_RELEASE_OWNER"]
    assert owner in {item["metadata"]["name"] for item in of_kind(found, "ConfigMap")}
    asked = {item["name"].removeprefix("NEXRL_RELEASE_").lower() for item in maker["env"]}
    assert asked <= ReleaseSettings.model_fields.keys()


def test_operator_reads_the_certificate_that_the_chart_asks_for() -> None:
    found = objects(EVERYTHING)
    asked = {item["spec"]["secretName"]: item["spec"]["dnsNames"] for item in of_kind(found, "Certificate")}
    (told,) = [item["value"] for item in _environment(found) if item["name"] == "NEXRL_OPERATOR_OWN_TLS_SECRET"]
    assert asked[told] == [OPERATOR]


def test_labels_of_a_metric_are_kept() -> None:
    """Prometheus must not replace a metric's own `component` or `namespace` by that of the pod it reads from."""
    (service,) = of_kind(objects(EVERYTHING), "ServiceMonitor")
    (pod,) = of_kind(objects(EVERYTHING), "PodMonitor")
    for endpoint in (*service["spec"]["endpoints"], *pod["spec"]["podMetricsEndpoints"]):
        assert endpoint["honorLabels"] is True


def test_redis_loads_a_certificate_that_has_changed(tmp_path: Path) -> None:
    """Its readiness probe requests the load until it succeeds. A refused load does not make Redis unready."""
    certificate, refusal, calls = tmp_path / "tls.crt", tmp_path / "refused", tmp_path / "calls"
    (script,) = [item["data"]["ready"] for item in of_kind(objects(()), "ConfigMap") if "ready" in item.get("data", {})]
    script = script.replace("/etc/nexrl/tls", str(tmp_path)).replace("/run/redis", str(tmp_path))
    program = tmp_path / "redis-cli"
    program.write_text(f"""#!/bin/sh
echo "$*" >> {calls}
case "$*" in *ping) echo PONG ;; *) [ -e {refusal} ] && echo ERR || echo OK ;; esac
""")
    program.chmod(0o700)

    def loads() -> int:
        calls.write_text("")
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(["sh", "-c", script], env={"PATH": path}, timeout=LIMIT_SECONDS, check=False)
        assert done.returncode == 0
        return calls.read_text().count("config set tls-cert-file")

    certificate.write_text("first")
    (tmp_path / "loaded.crt").write_text("first")  # as `start` leaves it
    assert loads() == 0
    certificate.write_text("second")
    refusal.touch()
    assert [loads(), loads()] == [1, 1]
    refusal.unlink()
    assert [loads(), loads()] == [1, 0]


def _environment(found: Sequence[Object]) -> list[Object]:
    (operator,) = of_kind(found, "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    known: list[Object] = container["env"]
    return known
