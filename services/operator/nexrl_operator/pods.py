"""The pod template of a component: container, environment, volumes, probes. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nexrl.components import BY_NAME, COMPONENTS, WITH_PODS, Component, Wiring
from nexrl.k8s.security import CONTAINER_SECURITY, POD_SECURITY
from nexrl.run_layout import LOGS_FOLDER
from nexrl.settings import ALIVE
from nexrl.spec import Experiment, ExperimentSpec
from nexrl.spec.rollout import ExternalRollout
from nexrl.tls import experiment_name
from nexrl_operator.api_objects import MAIN_CONTAINER
from nexrl_operator.objects import (
    DATA_READER_PORT,
    EXPERIMENT_FOLDER,
    GRPC_PORT,
    HEALTH_PORT,
    HTTP_PORT,
    METRICS_PORT,
    RUN_FOLDER,
    TLS_FOLDER,
    TOKEN_PORT,
    Object,
    Owner,
)
from nexrl_operator.settings import OperatorSettings
from nexrl_operator.templates import lay_over

_OTHER_USER = {"runAsUser": 10002, "runAsGroup": 10002}
"""Of a container with user code: it sees the processes beside it, but the kernel keeps it from their environment."""
TOKEN_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
STARTUP_SECONDS = 2700
"""Longest time for a container to start: vLLM may have to load and compile a large model."""


DISK = "ephemeral-storage"
INTERCHANGEABLE = tuple(each for each in WITH_PODS if each.has_replicas and each.name != "trainer")
"""Components whose replicas do the same work: they are spread over nodes and evicted one at a time. The trainers of a
gang prefer to be close together, and one that is evicted takes all others with it."""
SOCKETS_SIZE, SHARED_MEMORY_SIZE = "16Mi", "16Gi"
"""Largest content of the volumes in memory. Without a size, a pod could fill half of its node's memory with files."""


def _requests(cpu: str, memory: str, disk: str) -> Mapping[str, str]:
    return {"cpu": cpu, "memory": memory, DISK: disk}


@dataclass(frozen=True)
class PodShape:
    """What the pods of a component need of the cluster."""

    image: str
    """One of the release's images: the last part of an OperatorSettings field."""
    requests: Mapping[str, str]
    memory_limit: str = ""
    """Unless the release or the user's template names memory; "": none. The size of the model decides what trainer and
    engine need, and a limit below it would end a run that works."""
    volume_size: str = "4Gi"
    """Largest content of each volume on the node's disk. A pod can write nothing else there but logs, which the kubelet
    rotates, and its termination message: its root file system is read-only."""
    grace_seconds: int = 75
    has_run_folder: bool = False
    has_shared_memory: bool = False


SHAPES: Mapping[str, PodShape] = {
    "controller": PodShape("control", _requests("50m", "128Mi", "64Mi"), "1Gi", has_run_folder=True),
    "data-reader": PodShape("control", _requests("50m", "128Mi", "64Mi"), "8Gi", "32Gi"),
    "trajectory-pool": PodShape("control", _requests("100m", "128Mi", "64Mi"), "8Gi"),
    "weight-sync": PodShape("control", _requests("50m", "128Mi", "64Mi"), "1Gi"),
    "trainer": PodShape(
        "trainer",
        _requests("200m", "1Gi", "512Mi"),
        volume_size="64Gi",
        grace_seconds=120,
        has_run_folder=True,
        has_shared_memory=True,
    ),
    "inference": PodShape("inference", _requests("200m", "1Gi", "512Mi"), volume_size="64Gi", has_shared_memory=True),
    "rollout": PodShape("rollout", _requests("100m", "512Mi", "512Mi"), "16Gi", "32Gi"),
}


@dataclass(frozen=True)
class PodTemplates:
    """Renders the pod templates of one experiment."""

    owner: Owner
    experiment: Experiment
    settings: OperatorSettings

    def render(self, name: str, instance: Sequence[Object]) -> Object:
        """Return the pod template of a component; `instance` are the variables that set NEXRL_INSTANCE."""
        component = BY_NAME[name]
        section = getattr(self.experiment.spec, component.section)
        rendered = self._pod(component, instance)
        template = section.template.model_dump(mode="json") if section.template else {}
        pod: Object = lay_over(rendered, template)
        for each in (component, *_beside(component)):
            _limit_memory(pod, container_of(each), SHAPES[each.name])
        _keep_last_words(pod)
        pod["metadata"]["labels"] |= self.owner.labels(name)  # a template must not change those that select the pods
        return pod

    def _pod(self, component: Component, instance: Sequence[Object]) -> Object:
        volumes = dict(self._volumes(component.name))
        containers = [self._container(component, instance, volumes)]
        for each in _beside(component):
            own = dict(self._volumes_beside(each))
            containers.append(self._container(each, _instance_beside(each, instance), own))
            volumes |= own
        spec: Object = {
            "automountServiceAccountToken": self._checks_tokens(component.name),
            "enableServiceLinks": False,
            # The kernel drops SIGTERM for process 1 until it installs a handler, and ours import for seconds first.
            # With a shared namespace, the pause process is process 1.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": SHAPES[component.name].grace_seconds,
            "securityContext": POD_SECURITY,
            "containers": containers,
            "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        }
        if component in INTERCHANGEABLE:
            # Preferred only: a cluster with one node runs them all.
            spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
            selector = {"labelSelector": {"matchLabels": self.owner.selector(component.name)}}
            spec["topologySpreadConstraints"] = [spread | selector]
        if component.name == "trainer" and self.experiment.spec.trainer.replicas > 1 and not self._is_shared:
            # Pods of one node may share a ReadWriteOnce volume.
            here = {"topologyKey": "kubernetes.io/hostname"}
            selector = {"labelSelector": {"matchLabels": self.owner.selector(component.name)}}
            spec["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [here | selector]}}
        if self.settings.service_account:
            spec["serviceAccountName"] = self.settings.service_account
        metadata = {"labels": self.owner.labels(component.name), "annotations": _annotations(component.name)}
        return {"metadata": metadata, "spec": spec}

    def _container(
        self, component: Component, instance: Sequence[Object], volumes: Mapping[str, tuple[Path, Object]]
    ) -> Object:
        shape = SHAPES[component.name]
        image = self.experiment.spec.inference.IMAGE if component.name == "inference" else shape.image
        return {
            "name": container_of(component),
            "image": getattr(self.settings, f"image_{image}"),
            "imagePullPolicy": self.settings.image_pull_policy,
            "args": [component.name],
            "env": [*instance, *self._environment(component)],
            **self._storage_credentials(component.name),
            "resources": lay_over({"requests": self._requests(shape)}, self.settings.resources.get(component.name, {})),
            "securityContext": CONTAINER_SECURITY | (_OTHER_USER if component.beside else {}),
            "volumeMounts": [_mount(name, path, source) for name, (path, source) in volumes.items()],
            **({} if component.beside else {"ports": self._ports(component.name), **_probes(component)}),
        }

    def _requests(self, shape: PodShape) -> Object:
        # Kueue never admits pods that ask for a resource without a quota, and few queues have one for disks.
        return {name: value for name, value in shape.requests.items() if name != DISK or not self.settings.kueue}

    def _ports(self, component: str) -> list[Object]:
        ports = {"grpc": GRPC_PORT, "metrics": METRICS_PORT, "health": HEALTH_PORT}
        if serves_http(component, self.experiment.spec):
            ports["http"] = HTTP_PORT
        if self._checks_tokens(component):
            ports["grpc-token"] = TOKEN_PORT
        return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]

    def _environment(self, component: Component) -> Iterator[Object]:
        yield from_field("NEXRL_POD_IP", "status.podIP")
        values = {**self._wiring().environment(component, self.experiment.spec), "HOME": "/tmp"}
        if component.beside:
            values["NEXRL_LISTEN"] = f"127.0.0.1:{DATA_READER_PORT}"  # only containers of this pod reach it
        else:
            values |= {
                "NEXRL_LISTEN": f"0.0.0.0:{GRPC_PORT}",
                "NEXRL_ADVERTISE": "$(NEXRL_POD_IP)",
                "NEXRL_HEALTH_PORT": str(HEALTH_PORT),
                "NEXRL_METRICS_PORT": str(METRICS_PORT),
                "NEXRL_HTTP_PORT": str(HTTP_PORT),
            }
        if self._checks_tokens(component.name):
            values["NEXRL_TOKEN_PORT"] = str(TOKEN_PORT)
        if not component.beside and (self._mounts_run(component.name) or self._is_shared):
            values["NEXRL_KEEPS_LOG"] = "true"
        if self._mounts_run(component.name) and not self._mounts_run("controller"):
            values["NEXRL_KEEPS_METRICS"] = str("jsonl" in self.experiment.spec.logger.backends).lower()
        if self.settings.tls != "off":
            values |= {
                "NEXRL_TLS_CERT": str(TLS_FOLDER / "tls.crt"),
                "NEXRL_TLS_KEY": str(TLS_FOLDER / "tls.key"),
                "NEXRL_TLS_CA": str(TLS_FOLDER / "ca.crt"),
                "NEXRL_TLS_NAME": experiment_name(self.owner.namespace, self.owner.name),
            }
        for name, value in values.items():
            yield variable(name, value)
        if component.uses_redis and self.experiment.spec.redis.url is None:
            yield {
                "name": "NEXRL_REDIS_PASSWORD",
                "valueFrom": {"secretKeyRef": {"name": f"{self.owner.name}-redis", "key": "password"}},
            }

    def _storage_credentials(self, component: str) -> Object:
        """Return the variables from the user's Secret. The trainer copies the run; no other pod gets them."""
        secret = self.experiment.spec.storage.secret_name
        return {"envFrom": [{"secretRef": {"name": secret}}]} if secret and component == "trainer" else {}

    def _wiring(self) -> Wiring:
        own_url = self.experiment.spec.redis.url
        return Wiring(
            experiment_file=EXPERIMENT_FOLDER / "experiment.yaml",
            run_folder=RUN_FOLDER,
            controller=self.owner.address("controller"),
            data_reader=f"127.0.0.1:{DATA_READER_PORT}",
            trajectory_pool=self.owner.address("trajectory-pool"),
            weight_sync=self.owner.address("weight-sync"),
            redis_url=own_url or self.settings.redis_url_of(self.owner.ledger),
            redis_is_managed=own_url is None,
        )

    def _volumes(self, component: str) -> Iterator[tuple[str, tuple[Path, Object]]]:
        name, shape = self.owner.name, SHAPES[component]
        yield self._experiment_volume()
        yield "tmp", (Path("/tmp"), {"emptyDir": {"sizeLimit": shape.volume_size}})
        yield "sockets", (Path("/run/nexrl"), {"emptyDir": {"medium": "Memory", "sizeLimit": SOCKETS_SIZE}})
        claim = {"persistentVolumeClaim": {"claimName": f"{name}-run"}}
        if self._mounts_run(component):
            yield "run", (RUN_FOLDER, claim)
        else:
            yield "run", (RUN_FOLDER, {"emptyDir": {"sizeLimit": shape.volume_size}})
            if self._is_shared:  # user code of rollouts must not reach the checkpoints
                yield LOGS_FOLDER, (RUN_FOLDER / LOGS_FOLDER, claim)
        if shape.has_shared_memory:
            yield (
                "shared-memory",
                (Path("/dev/shm"), {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_SIZE}}),
            )
        yield from self._tls_volume()

    def _volumes_beside(self, component: Component) -> Iterator[tuple[str, tuple[Path, Object]]]:
        """Yield the volumes of a container with user code: none that the container beside it writes or trusts."""
        yield self._experiment_volume()
        yield f"{component.name}-tmp", (Path("/tmp"), {"emptyDir": {"sizeLimit": SHAPES[component.name].volume_size}})
        # Where a volume is mounted, Kubernetes mounts no token of the ServiceAccount.
        yield f"{component.name}-no-token", (TOKEN_FOLDER, {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
        yield from self._tls_volume()

    def _experiment_volume(self) -> tuple[str, tuple[Path, Object]]:
        return "experiment", (EXPERIMENT_FOLDER, {"configMap": {"name": f"{self.owner.name}-experiment"}})

    def _tls_volume(self) -> Iterator[tuple[str, tuple[Path, Object]]]:
        if self.settings.tls != "off":
            secret = self.settings.tls_secret if self.settings.tls == "secret" else f"{self.owner.name}-tls"
            yield "tls", (TLS_FOLDER, {"secret": {"secretName": secret}})

    @property
    def _is_shared(self) -> bool:
        """Whether pods on several nodes can mount the volume."""
        return self.experiment.spec.storage.access_mode == "ReadWriteMany"

    def _mounts_run(self, component: str) -> bool:
        """Return whether a component mounts the whole volume.

        Only the trainer mounts a ReadWriteOnce volume; it would pin every other pod to the trainer's node.
        """
        return SHAPES[component].has_run_folder and (self._is_shared or component == "trainer")

    def _checks_tokens(self, component: str) -> bool:
        """Return whether a component serves the token port, because rollout workers or agents of users call it."""
        is_enabled = self.settings.token_reviews and self.settings.tls != "off"
        is_called = component not in ("rollout", "trainer", "data-reader")
        return is_enabled and (is_called or serves_agents(component, self.experiment.spec))


def serves_agents(component: str, spec: ExperimentSpec) -> bool:
    """Return whether agents of other pods call the component. It then runs no code of the user."""
    return component == "rollout" and isinstance(spec.rollout, ExternalRollout)


def serves_http(component: str, spec: ExperimentSpec) -> bool:
    """Return whether the component has an OpenAI-compatible API."""
    return component == "inference" or serves_agents(component, spec)


def container_of(component: Component) -> str:
    """Return the name of a component's container."""
    return component.name if component.beside else MAIN_CONTAINER


def variable(name: str, value: str) -> Object:
    """Return an environment variable with a value."""
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Object:
    """Return an environment variable with the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _annotations(component: str) -> dict[str, str]:
    if component != "trainer":
        return {}
    return {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}


def _beside(component: Component) -> list[Component]:
    """Return the components with a container in the pods of this one."""
    return [each for each in COMPONENTS if each.beside == component.name]


def _instance_beside(component: Component, instance: Sequence[Object]) -> list[Object]:
    """Return the variables that set NEXRL_INSTANCE beside a container with those of `instance`."""
    if "value" in instance[0]:
        return [variable("NEXRL_INSTANCE", component.name)]
    return [
        from_field("NEXRL_POD", "metadata.name"),
        variable("NEXRL_INSTANCE", f"$(NEXRL_POD)-{component.name}"),
    ]


def _limit_memory(pod: Object, container: str, shape: PodShape) -> None:
    """Limit the memory of a container, unless the release or the user's template names its memory."""
    containers = pod["spec"]["containers"]
    for each in filter(_is_mapping, containers if isinstance(containers, list) else []):
        resources = each.get("resources")
        if not shape.memory_limit or each.get("name") != container or not _is_mapping(resources):
            continue
        asked, limits = resources.get("requests"), resources.get("limits", {})
        # A default limit below a request of the user would make the API server refuse the pod.
        if _is_mapping(asked) and _is_mapping(limits) and asked.get("memory") == shape.requests["memory"]:
            each["resources"] = {**resources, "limits": {"memory": shape.memory_limit, **limits}}


def _keep_last_words(pod: Object) -> None:
    """Have the end of each failed container's log in its status, where ReportExit takes it from.

    Also of the containers that the user's template adds.
    """
    for kind in ("initContainers", "containers"):
        containers = pod["spec"].get(kind)
        for each in filter(_is_mapping, containers if isinstance(containers, list) else []):
            each.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _is_mapping(value: object) -> bool:
    """Return False for what the API server will refuse: a template may contain anything."""
    return isinstance(value, Mapping)


def _probes(component: Component) -> Object:
    # The control services must answer gRPC health: one whose event loop hangs does not. Components that compute may
    # block theirs for minutes, so an open port is enough.
    is_control = SHAPES[component.name].image == "control"
    alive = {"grpc": {"port": HEALTH_PORT, "service": ALIVE}} if is_control else {"tcpSocket": {"port": "health"}}
    return {
        "startupProbe": {**alive, "periodSeconds": 5, "failureThreshold": STARTUP_SECONDS // 5},
        # Two minutes of failures: PyTorch may hold the interpreter for a while in a process that works.
        "livenessProbe": {**alive, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {"grpc": {"port": HEALTH_PORT}, "periodSeconds": 5, "timeoutSeconds": 5},
    }


def _mount(name: str, path: Path, source: Object) -> Object:
    mount: Object = {"name": name, "mountPath": str(path)}
    if "configMap" in source or "secret" in source or path == TOKEN_FOLDER:
        mount["readOnly"] = True
    if name == LOGS_FOLDER:
        mount["subPath"] = LOGS_FOLDER
    return mount
