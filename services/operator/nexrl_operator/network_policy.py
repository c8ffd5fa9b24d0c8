"""The NetworkPolicy of an experiment: which connections its pods accept and may open. Pure."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from nexrl.spec import ExperimentSpec
from nexrl_operator.objects import (
    COMPONENT_LABEL,
    EXPERIMENT_LABEL,
    GROUP,
    GRPC_PORT,
    HTTP_PORT,
    METRICS_PORT,
    TOKEN_PORT,
    Object,
    Owner,
)
from nexrl_operator.pods import serves_agents
from nexrl_operator.settings import OperatorSettings

REDIS_PORT = 6379


def network_policy(owner: Owner, spec: ExperimentSpec, settings: OperatorSettings) -> Object:
    """Return the policy for all pods of an experiment. It allows these connections:

    - between the pods, at any port, because each weight broadcast chooses a port;
    - from the pods to DNS, to the servers in `settings.egress`, and to the port of the Redis that the spec names;
    - from the operator to the gRPC port of the pods;
    - from namespaces with the label nexrl.dev/metrics to the metrics port of the pods.
    """
    own = {"podSelector": {"matchLabels": {EXPERIMENT_LABEL: owner.name}}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.release_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "nexrl", COMPONENT_LABEL: "operator"}},
    }
    policy = {
        **own,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [own]},
            {"from": [operator], "ports": [{"port": GRPC_PORT, "protocol": "TCP"}]},
            {
                "from": [{"namespaceSelector": {"matchLabels": {f"{GROUP}/metrics": "allowed"}}}],
                "ports": [{"port": METRICS_PORT, "protocol": "TCP"}],
            },
        ],
        "egress": [
            {"to": [own]},
            {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]},
            *settings.egress,
            *({"ports": [{"port": port, "protocol": "TCP"}]} for port in _server_ports(spec)),
        ],
    }
    return owner.new_object("networking.k8s.io/v1", "NetworkPolicy", "pods", "pods") | {"spec": policy}


def agents_policy(owner: Owner, spec: ExperimentSpec) -> Object | None:
    """Return the policy that lets agents in other pods of the namespace reach the gateways; None without gateways."""
    if not serves_agents("rollout", spec):
        return None
    policy = {
        "podSelector": {"matchLabels": dict(owner.selector("rollout"))},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": {f"{GROUP}/agents-of": owner.name}}}],
                "ports": [{"port": port, "protocol": "TCP"} for port in (GRPC_PORT, TOKEN_PORT, HTTP_PORT)],
            }
        ],
    }
    return owner.new_object("networking.k8s.io/v1", "NetworkPolicy", "rollout", "agents") | {"spec": policy}


def storage_policy(owner: Owner, spec: ExperimentSpec) -> Object | None:
    """Return the policy that lets the trainer reach the object storage of the spec; None if there is none."""
    if spec.storage.uri is None or spec.storage.uri.startswith("file:"):
        return None
    endpoint = urlsplit(spec.storage.endpoint or "https://")
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    policy = {
        "podSelector": {"matchLabels": dict(owner.selector("trainer"))},
        "policyTypes": ["Egress"],
        "egress": [{"ports": [{"port": port, "protocol": "TCP"}]}],
    }
    return owner.new_object("networking.k8s.io/v1", "NetworkPolicy", "trainer", "storage") | {"spec": policy}


def _server_ports(spec: ExperimentSpec) -> Iterator[int]:
    """Yield the port of the Redis that the spec names, if it names one."""
    if spec.redis.url is not None:
        yield urlsplit(spec.redis.url).port or REDIS_PORT
