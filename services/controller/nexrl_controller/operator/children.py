"""The objects of one experiment, rendered from its spec. Pure: nothing here has seen the cluster."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nexrl.settings import ALIVE
from nexrl.spec import Experiment, dump_resolved, with_folder
from nexrl.spec.experiment import LEDGER_ANNOTATION
from nexrl.tls import experiment_name
from nexrl_controller.operator.settings import OperatorSettings
from nexrl_controller.operator.templates import lay_over

Object = dict[str, Any]

GROUP = "nexrl.dev"
EXPERIMENT_LABEL = f"{GROUP}/experiment"
MANAGED_BY_LABEL, OPERATOR = "app.kubernetes.io/managed-by", "nexrl-operator"
ATTEMPT_LABEL = f"{GROUP}/attempt"
REVISION = f"{GROUP}/revision"
"""Annotation: digest of what of the spec an object was made from. Another operator's rendering does not change it, so
that its upgrade restarts nothing."""
RUN_FOLDER = Path("/var/lib/nexrl/run")
EXPERIMENT_FOLDER = Path("/etc/nexrl/experiment")
TLS_FOLDER = Path("/etc/nexrl/tls")
GRPC_PORT, TOKEN_PORT, HEALTH_PORT, HTTP_PORT, METRICS_PORT = 50051, 50052, 50053, 8000, 9090
USER = 10001
REDIS_PORT = 6379
_ACCOUNT = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken")
STARTUP_SECONDS = 2700
"""Longest time for a container to come up: vLLM may have to load and compile a large model."""


@dataclass(frozen=True)
class Component:
    """One kind of pod."""

    name: str
    image: str
    """Which of the release's images: the last part of an OperatorSettings field."""
    section: str
    """The part of the spec with its template."""
    wave: int
    """Those of a wave stop together, before those of the next: each before what it needs to end well."""
    requests: Mapping[str, str]
    grace_seconds: int = 75
    has_run_folder: bool = False
    has_shared_memory: bool = False


COMPONENTS = (
    Component("rollout", "rollout", "rollout", 0, {"cpu": "100m", "memory": "512Mi"}),
    Component(
        "trainer",
        "trainer",
        "trainer",
        0,
        {"cpu": "200m", "memory": "1Gi"},
        grace_seconds=120,
        has_run_folder=True,
        has_shared_memory=True,
    ),
    Component("inference", "inference", "inference", 1, {"cpu": "200m", "memory": "1Gi"}, has_shared_memory=True),
    Component("weight-sync", "control", "weight_sync", 1, {"cpu": "50m", "memory": "128Mi"}),
    Component("trajectory-pool", "control", "trajectory_pool", 2, {"cpu": "100m", "memory": "256Mi"}),
    Component("controller", "control", "controller", 3, {"cpu": "50m", "memory": "128Mi"}, has_run_folder=True),
)
BY_NAME = {component.name: component for component in COMPONENTS}


@dataclass(frozen=True)
class Owner:
    """The experiment as the cluster has it."""

    namespace: str
    name: str
    uid: str

    @property
    def ledger(self) -> str:
        """Its name in Redis: an experiment that is deleted and made again begins anew."""
        return f"{self.namespace}.{self.name}.{self.uid[:8]}"

    def reference(self) -> Object:
        """What its objects say about their owner."""
        return {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "Experiment",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def address(self, component: str) -> str:
        """Where the pods of a component serve gRPC."""
        return f"dns:///{self.name}-{component}.{self.namespace}.svc:{GRPC_PORT}"


@dataclass(frozen=True)
class Renderer:
    """Renders the objects of one experiment."""

    owner: Owner
    experiment: Experiment
    settings: OperatorSettings
    max_rollouts: int | None = None
    """As many as a queue has admitted; None where none is asked."""

    def foundation(self) -> list[Object]:
        """What is there before any pod, and stays after the last: configuration, volume, Services, NetworkPolicy.

        The ConfigMap comes first.
        """
        policies = [self.network_policy()] if self.settings.network_policy else []
        return [self.config_map(), self.claim(), *(self.service(c) for c in COMPONENTS), *policies]

    def config_map(self) -> Object:
        """The resolved experiment, and the modules of the user."""
        experiment = self.experiment
        code = experiment.spec.code
        metadata = experiment.metadata.model_copy(
            update={"annotations": {LEDGER_ANNOTATION: self.owner.ledger}, "labels": {}}
        )
        spec = experiment.spec.model_copy(update={"code": {}, "suspend": False})
        resolved = with_folder(experiment.model_copy(update={"metadata": metadata, "spec": spec}), EXPERIMENT_FOLDER)
        item = self._object("v1", "ConfigMap", "experiment", "experiment")
        item["metadata"]["annotations"] = {REVISION: self.configuration_revision()}
        return item | {"data": {"experiment.yaml": dump_resolved(resolved), **code}}

    def claim(self) -> Object:
        """The volume with the run's folder."""
        storage = self.experiment.spec.storage
        spec: Object = {
            "accessModes": [storage.access_mode],
            "resources": {"requests": {"storage": storage.size}},
        }
        if storage.storage_class_name is not None:
            spec["storageClassName"] = storage.storage_class_name
        return self._object("v1", "PersistentVolumeClaim", "run", "run") | {"spec": spec}

    def service(self, component: Component) -> Object:
        """Headless: gRPC clients see every pod, also those that are not ready: starting, they wait for each other."""
        ports = {"grpc": GRPC_PORT, "metrics": METRICS_PORT}
        if component.name == "inference":
            ports["http"] = HTTP_PORT
        if self.settings.tls != "off":
            ports["grpc-token"] = TOKEN_PORT
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self.selector(component.name),
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()],
        }
        return self._object("v1", "Service", component.name, component.name) | {"spec": spec}

    def network_policy(self) -> Object:
        """Pods of the experiment reach each other at any port, as broadcasts need, and what the release and the spec
        name; the operator reaches gRPC; metrics are for whoever collects them."""
        own = {"podSelector": {"matchLabels": {EXPERIMENT_LABEL: self.owner.name}}}
        operator = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.settings.release_namespace}},
            "podSelector": {
                "matchLabels": {"app.kubernetes.io/part-of": "nexrl", "app.kubernetes.io/component": "operator"}
            },
        }
        spec = {
            "podSelector": {"matchLabels": {EXPERIMENT_LABEL: self.owner.name}},
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
                *self.settings.egress,
                *({"ports": [{"port": port, "protocol": "TCP"}]} for port in self._outside_ports()),
            ],
        }
        return self._object("networking.k8s.io/v1", "NetworkPolicy", "pods", "pods") | {"spec": spec}

    def secret(self, suffix: str) -> Object:
        """A Secret of the experiment, without its content."""
        return self._object("v1", "Secret", suffix, suffix) | {"type": "Opaque"}

    def admission(self) -> Object:
        """The object by which Kueue admits the experiment, without its content."""
        return self._object("kueue.x-k8s.io/v1beta2", "Workload", "admission", "admission")

    def replicas(self) -> dict[str, int]:
        """Pods that each component should have."""
        spec, most = self.experiment.spec, self.max_rollouts
        rollouts = spec.rollout.replicas if most is None else min(spec.rollout.replicas, most)
        wanted = {
            "trajectory-pool": spec.trajectory_pool.replicas,
            "weight-sync": 1,
            "inference": spec.inference.replicas,
            "trainer": spec.trainer.replicas,
            "rollout": rollouts,
            "controller": 1,  # the last one to be made: where it is, all others were made
        }
        return {name: count for name, count in wanted.items() if name != "inference" or spec.inference.url is None}

    def workloads(self, attempt: int) -> dict[str, Object]:
        """By component, what makes its pods; `attempt` numbers the trainer's Job."""
        counts = self.replicas()
        made: dict[str, Object] = {}
        for name, count in counts.items():
            match name:
                case "trainer":
                    made[name] = self._job(name, attempt)
                case "inference" | "rollout":
                    made[name] = self._stateful_set(name, count)
                case _:
                    made[name] = self._deployment(name, count)
        return made

    def selector(self, component: str) -> Mapping[str, str]:
        """Labels that find the pods of a component, of this experiment alone."""
        return {
            "app.kubernetes.io/name": "nexrl",
            "app.kubernetes.io/instance": self.owner.name,
            "app.kubernetes.io/component": component,
            EXPERIMENT_LABEL: self.owner.name,
        }

    def configuration_revision(self) -> str:
        """Digest of what all pods read."""
        # Without defaults: one that another version adds, or has otherwise, changes no experiment that runs.
        spec = self.experiment.spec.model_dump(mode="json", exclude_defaults=True)
        for section in {component.section for component in COMPONENTS}:
            spec.get(section, {}).pop("template", None)
        spec.get("rollout", {}).pop("replicas", None)
        for live in ("suspend", "active_deadline_seconds", "startup_deadline_seconds", "ttl_seconds_after_finished"):
            spec.pop(live, None)
        return _digest({section: value for section, value in spec.items() if value != {}})

    def revision(self, component: str) -> str:
        """Digest of what the pods of a component are made from, besides what all read."""
        section = getattr(self.experiment.spec, BY_NAME[component].section)
        template = section.template.model_dump(mode="json", exclude_defaults=True) if section.template else None
        return _digest(template)

    # kinds of workloads ----------------------------------------------------------------------------------------------

    def _deployment(self, component: str, replicas: int) -> Object:
        item = self._workload("apps/v1", "Deployment", component, component)
        return item | {
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": self.selector(component)},
                # Two controllers, or two weight syncs, would be one too many.
                "strategy": {"type": "RollingUpdate" if component == "trajectory-pool" else "Recreate"},
                "template": self._pod(
                    BY_NAME[component],
                    [_from_field("NEXRL_INSTANCE", "metadata.name")]
                    if replicas > 1
                    else [_variable("NEXRL_INSTANCE", component)],
                ),
            }
        }

    def _stateful_set(self, component: str, replicas: int) -> Object:
        item = self._workload("apps/v1", "StatefulSet", component, component)
        number = _from_field("NEXRL_POD_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']")
        return item | {
            "spec": {
                "replicas": replicas,
                "serviceName": f"{self.owner.name}-{component}",
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": self.selector(component)},
                "template": self._pod(
                    BY_NAME[component], [number, _variable("NEXRL_INSTANCE", f"{component}-$(NEXRL_POD_INDEX)")]
                ),
            }
        }

    def _job(self, component: str, attempt: int) -> Object:
        item = self._workload("batch/v1", "Job", component, f"{component}-{attempt}")
        item["metadata"]["labels"][ATTEMPT_LABEL] = str(attempt)
        replicas = self.experiment.spec.trainer.replicas
        pod = self._pod(BY_NAME[component], [_variable("NEXRL_INSTANCE", component)])
        pod["spec"]["restartPolicy"] = "Never"
        return item | {
            "spec": {
                "completionMode": "Indexed",
                "completions": replicas,
                "parallelism": replicas,
                "backoffLimit": 0,  # a gang starts again as a whole, from its checkpoint, as another Job
                "template": pod,
            }
        }

    def _workload(self, api_version: str, kind: str, component: str, suffix: str) -> Object:
        item = self._object(api_version, kind, component, suffix)
        item["metadata"]["annotations"] = {REVISION: self.revision(component)}
        return item

    def _object(self, api_version: str, kind: str, component: str, suffix: str) -> Object:
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": f"{self.owner.name}-{suffix}",
                "namespace": self.owner.namespace,
                "labels": self._labels(component),
                "ownerReferences": [self.owner.reference()],
            },
        }

    def _labels(self, component: str) -> dict[str, str]:
        return {
            **self.selector(component),
            "app.kubernetes.io/part-of": "nexrl",
            MANAGED_BY_LABEL: OPERATOR,
        }

    # pods ------------------------------------------------------------------------------------------------------------

    def _pod(self, component: Component, instance: Sequence[Object]) -> Object:
        section = getattr(self.experiment.spec, component.section)
        volumes = dict(self._volumes(component))
        rendered: Object = {
            "metadata": {"labels": self._labels(component.name), "annotations": self._pod_annotations(component)},
            "spec": {
                "automountServiceAccountToken": self._judges_tokens(component),
                "enableServiceLinks": False,
                # A first process gets no SIGTERM before it asks for it, and ours import for seconds: let it be another.
                "shareProcessNamespace": True,
                "terminationGracePeriodSeconds": component.grace_seconds,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER,
                    "runAsGroup": USER,
                    "fsGroup": USER,
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [self._container(component, instance, volumes)],
                "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
            },
        }
        if self.settings.service_account:
            rendered["spec"]["serviceAccountName"] = self.settings.service_account
        template = section.template.model_dump(mode="json") if section.template else {}
        pod: Object = lay_over(rendered, template)
        # What finds the pods is not the template's, nor is whose rights they have.
        pod["metadata"]["labels"] |= self._labels(component.name)
        account = {key: rendered["spec"][key] for key in _ACCOUNT if key in rendered["spec"]}
        pod["spec"] = {key: value for key, value in pod["spec"].items() if key not in _ACCOUNT} | account
        return pod

    def _container(
        self, component: Component, instance: Sequence[Object], volumes: Mapping[str, tuple[Path, Object]]
    ) -> Object:
        is_vllm = component.name == "inference" and self.experiment.spec.inference.backend == "vllm"
        ports = {"grpc": GRPC_PORT, "metrics": METRICS_PORT, "health": HEALTH_PORT}
        if component.name == "inference":
            ports["http"] = HTTP_PORT
        if self._judges_tokens(component):
            ports["grpc-token"] = TOKEN_PORT
        return {
            "name": "nexrl",
            "image": getattr(self.settings, f"image_{'vllm' if is_vllm else component.image}"),
            "imagePullPolicy": self.settings.image_pull_policy,
            "args": [component.name],
            "env": [*instance, *self._environment(component)],
            "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
            "resources": {"requests": dict(component.requests)},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            # The tail of the log, when it fails: what ReportExit tells.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": name, "mountPath": str(path), **({"readOnly": True} if _is_read_only(source) else {})}
                for name, (path, source) in volumes.items()
            ],
            **_probes(component),
        }

    def _environment(self, component: Component) -> Iterator[Object]:
        owner, threads = self.owner, {"trainer": "trainer", "inference": "inference"}.get(component.name)
        yield _from_field("NEXRL_POD_IP", "status.podIP")
        values = {
            "NEXRL_EXPERIMENT_FILE": str(EXPERIMENT_FOLDER / "experiment.yaml"),
            "NEXRL_RUN_DIR": str(RUN_FOLDER),
            "NEXRL_LISTEN": f"0.0.0.0:{GRPC_PORT}",
            "NEXRL_ADVERTISE": "$(NEXRL_POD_IP)",
            "NEXRL_HEALTH_PORT": str(HEALTH_PORT),
            "NEXRL_METRICS_PORT": str(METRICS_PORT),
            "NEXRL_HTTP_PORT": str(HTTP_PORT),
            "NEXRL_CONTROLLER": owner.address("controller") if component.name != "controller" else "",
            "NEXRL_TRAJECTORY_POOL": owner.address("trajectory-pool"),
            "NEXRL_WEIGHT_SYNC": owner.address("weight-sync"),
            "OMP_NUM_THREADS": str(getattr(self.experiment.spec, threads).threads if threads else 1),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HOME": "/tmp",
        }
        uses_redis = component.image == "control"  # the others run code of the user, or compute
        if uses_redis:
            values["NEXRL_REDIS_URL"] = self.experiment.spec.redis.url or self.settings.redis_url
        if self._judges_tokens(component):
            values["NEXRL_TOKEN_PORT"] = str(TOKEN_PORT)
        if self.settings.tls != "off":
            values |= {
                "NEXRL_TLS_CERT": str(TLS_FOLDER / "tls.crt"),
                "NEXRL_TLS_KEY": str(TLS_FOLDER / "tls.key"),
                "NEXRL_TLS_CA": str(TLS_FOLDER / "ca.crt"),
                "NEXRL_TLS_NAME": experiment_name(owner.namespace, owner.name),
            }
        for name, value in values.items():
            yield _variable(name, value)
        if uses_redis and self.settings.redis_secret and self.experiment.spec.redis.url is None:
            yield {
                "name": "NEXRL_REDIS_PASSWORD",
                "valueFrom": {"secretKeyRef": {"name": f"{owner.name}-redis", "key": "password"}},
            }

    def _volumes(self, component: Component) -> Iterator[tuple[str, tuple[Path, Object]]]:
        name = self.owner.name
        yield "experiment", (EXPERIMENT_FOLDER, {"configMap": {"name": f"{name}-experiment"}})
        yield "tmp", (Path("/tmp"), {"emptyDir": {}})
        yield "sockets", (Path("/run/nexrl"), {"emptyDir": {"medium": "Memory"}})
        # Of a volume that is on one node, only the trainer: who shares it could not start where no trainer is.
        is_shared = self.experiment.spec.storage.access_mode == "ReadWriteMany"
        if component.has_run_folder and (is_shared or component.name == "trainer"):
            yield "run", (RUN_FOLDER, {"persistentVolumeClaim": {"claimName": f"{name}-run"}})
        else:
            yield "run", (RUN_FOLDER, {"emptyDir": {}})
        if component.has_shared_memory:
            yield "shared-memory", (Path("/dev/shm"), {"emptyDir": {"medium": "Memory"}})
        if self.settings.tls != "off":
            secret = self.settings.tls_secret if self.settings.tls == "secret" else f"{name}-tls"
            yield "tls", (TLS_FOLDER, {"secret": {"secretName": secret}})

    def _outside_ports(self) -> Iterator[int]:
        """Ports of the servers that the spec names."""
        spec = self.experiment.spec
        for url in filter(None, (spec.redis.url, spec.inference.url)):
            parts = urlsplit(url)
            yield parts.port or {"http": 80, "https": 443}.get(parts.scheme, REDIS_PORT)

    def _judges_tokens(self, component: Component) -> bool:
        """Rollout workers of others, which show a token, call all but these two."""
        is_asked = self.settings.token_reviews and self.settings.tls != "off"
        return is_asked and component.name not in ("rollout", "trainer")

    def _pod_annotations(self, component: Component) -> dict[str, str]:
        if component.name != "trainer":
            return {}
        return {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}


def _probes(component: Component) -> Object:
    # One whose event loop hangs does not answer. What computes may hold its own for minutes: a port that is open is all
    # that is asked of it.
    is_light = component.image == "control"
    alive = {"grpc": {"port": HEALTH_PORT, "service": ALIVE}} if is_light else {"tcpSocket": {"port": "health"}}
    return {
        "startupProbe": {**alive, "periodSeconds": 5, "failureThreshold": STARTUP_SECONDS // 5},
        # A process that holds the interpreter for a while, as PyTorch may, is not dead.
        "livenessProbe": {**alive, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {"grpc": {"port": HEALTH_PORT}, "periodSeconds": 5, "timeoutSeconds": 5},
    }


def _is_read_only(source: Object) -> bool:
    return "configMap" in source or "secret" in source


def _variable(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
