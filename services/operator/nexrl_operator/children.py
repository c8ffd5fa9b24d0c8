"""The objects that an experiment owns, rendered from its spec. Pure: this module never looks at the cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nexrl.components import WITH_PODS
from nexrl.spec import Experiment, dump_resolved, with_folder
from nexrl.spec.experiment import GENERATION_ANNOTATION, LEDGER_ANNOTATION
from nexrl_operator.network_policy import agents_policy, network_policy, storage_policy
from nexrl_operator.objects import (
    ATTEMPT_LABEL,
    EXPERIMENT_FOLDER,
    GRPC_PORT,
    HTTP_PORT,
    JOB_LABEL,
    MANAGED_BY_LABEL,
    METRICS_PORT,
    OPERATOR,
    REPLICA_LABEL,
    TOKEN_PORT,
    Object,
    Owner,
)
from nexrl_operator.pods import INTERCHANGEABLE, PodTemplates, from_field, serves_http, variable
from nexrl_operator.revisions import (
    CONFIGURATION_FILE,
    REVISION,
    configuration_digests,
    configuration_revision,
    template_revision,
    with_rendered_digest,
)
from nexrl_operator.settings import OperatorSettings


@dataclass(frozen=True)
class Renderer:
    """Renders the objects of one experiment."""

    owner: Owner
    experiment: Experiment
    settings: OperatorSettings
    max_rollouts: int | None = None
    """The number of rollouts that a queue has admitted; None without a queue."""
    generation: int = 0
    """`metadata.generation` of the experiment when its pods were started."""

    def foundation(self) -> list[Object]:
        """Return the objects that outlive all pods: configuration, volume, Services, policies.

        The ConfigMap comes first.
        """
        return list(self._foundation)

    @cached_property
    def _foundation(self) -> Sequence[Object]:
        policies, spec = [], self.experiment.spec
        if self.settings.network_policy:
            some = (storage_policy(self.owner, spec), agents_policy(self.owner, spec))
            policies = [network_policy(self.owner, spec, self.settings), *(each for each in some if each)]
        if self.settings.disruption_budgets:
            policies += [self.disruption_budget(component.name) for component in INTERCHANGEABLE]
        services = [self.service(component.name) for component in WITH_PODS]
        return [self.config_map(), *map(with_rendered_digest, (self.claim(), *services, *policies))]

    def config_map(self) -> Object:
        """Return the resolved experiment and the user's modules."""
        experiment, generation = self.experiment, {GENERATION_ANNOTATION: str(self.generation)}
        annotations = {LEDGER_ANNOTATION: self.owner.ledger, **generation}
        metadata = experiment.metadata.model_copy(update={"annotations": annotations, "labels": {}})
        spec = experiment.spec.model_copy(update={"code": {}, "suspend": False})
        resolved = with_folder(experiment.model_copy(update={"metadata": metadata, "spec": spec}), EXPERIMENT_FOLDER)
        data = {CONFIGURATION_FILE: dump_resolved(resolved), **experiment.spec.code}
        item = self.owner.new_object("v1", "ConfigMap", "experiment", "experiment")
        revision = {REVISION: configuration_revision(experiment)}
        item["metadata"]["annotations"] = {**revision, **generation, **configuration_digests(resolved, data)}
        return item | {"data": data}

    def claim(self) -> Object:
        """Return the volume with the run's folder."""
        storage = self.experiment.spec.storage
        spec: Object = {
            "accessModes": [storage.access_mode],
            "resources": {"requests": {"storage": storage.size}},
        }
        if storage.storage_class_name is not None:
            spec["storageClassName"] = storage.storage_class_name
        return self.owner.new_object("v1", "PersistentVolumeClaim", "run", "run") | {"spec": spec}

    def service(self, component: str) -> Object:
        """Return a headless Service. It publishes pods that are not ready: pods that start wait for each other."""
        ports = {"grpc": GRPC_PORT, "metrics": METRICS_PORT}
        if serves_http(component, self.experiment.spec):
            ports["http"] = HTTP_PORT
        if self.settings.tls != "off":
            ports["grpc-token"] = TOKEN_PORT
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self.owner.selector(component),
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()],
        }
        return self.owner.new_object("v1", "Service", component, component) | {"spec": spec}

    def disruption_budget(self, component: str) -> Object:
        """Return the budget for draining nodes: of the pods of a component, one at a time.

        It never blocks a drain for good: it allows one eviction also where there is one pod, and does not protect pods
        that are not ready.
        """
        spec = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            # Pods that users label for the NetworkPolicy must not count: Kubernetes finds no scale of their owners.
            "selector": {"matchLabels": {**self.owner.selector(component), MANAGED_BY_LABEL: OPERATOR}},
        }
        return self.owner.new_object("policy/v1", "PodDisruptionBudget", component, component) | {"spec": spec}

    def replicas(self) -> dict[str, int]:
        """Return the number of pods of each component, in the order in which they are created."""
        spec = self.experiment.spec
        # The controller last: if it exists, all others were created.
        in_order = sorted(WITH_PODS, key=lambda component: component.name == "controller")
        counts = {component.name: component.replicas(spec) for component in in_order}
        if self.max_rollouts is not None:
            counts["rollout"] = min(counts["rollout"], self.max_rollouts)
        return counts

    def workloads(self, attempt: int) -> dict[str, Object]:
        """Return the object that creates the pods, by component; `attempt` numbers the trainer's Job."""
        made: dict[str, Object] = {}
        for name, count in self.replicas().items():
            match name:
                case "trainer":
                    made[name] = self._job(name, attempt)
                case "inference" | "rollout":
                    made[name] = self._stateful_set(name, count)
                case _:
                    made[name] = self._deployment(name, count)
        return {name: with_rendered_digest(item) for name, item in made.items()}

    def _deployment(self, component: str, replicas: int) -> Object:
        instance = (
            from_field("NEXRL_INSTANCE", "metadata.name") if replicas > 1 else variable("NEXRL_INSTANCE", component)
        )
        spec = {
            "replicas": replicas,
            "selector": {"matchLabels": self.owner.selector(component)},
            # There must never be two controllers, or two weight syncs, not even during an update.
            "strategy": {"type": "RollingUpdate" if component == "trajectory-pool" else "Recreate"},
            "template": self._pods().render(component, [instance]),
        }
        return self._workload("apps/v1", "Deployment", component, component) | {"spec": spec}

    def _stateful_set(self, component: str, replicas: int) -> Object:
        number = from_field("NEXRL_POD_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']")
        instance = variable("NEXRL_INSTANCE", f"{component}-$(NEXRL_POD_INDEX)")
        spec = {
            "replicas": replicas,
            "serviceName": f"{self.owner.name}-{component}",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": self.owner.selector(component)},
            "template": self._pods().render(component, [number, instance]),
        }
        return self._workload("apps/v1", "StatefulSet", component, component) | {"spec": spec}

    def _job(self, component: str, attempt: int) -> Object:
        item = self._workload("batch/v1", "Job", component, f"{component}-{attempt}")
        item["metadata"]["labels"][ATTEMPT_LABEL] = str(attempt)
        replicas = self.experiment.spec.trainer.replicas
        instance = self._replica_variables(replicas) if replicas > 1 else [variable("NEXRL_INSTANCE", component)]
        pod = self._pods().render(component, instance)
        pod["spec"]["restartPolicy"] = "Never"
        if replicas > 1:
            pod["spec"]["subdomain"] = f"{self.owner.name}-{component}"
        spec = {
            "completionMode": "Indexed",
            "completions": replicas,
            "parallelism": replicas,
            "backoffLimit": 0,  # a gang restarts as a whole from its checkpoint, as another Job
            "template": pod,
        }
        return item | {"spec": spec}

    def _replica_variables(self, replicas: int) -> list[Object]:
        """Return the variables with the place of a trainer's pod among the replicas, and the names of the others.

        Kubernetes gives each pod of an Indexed Job a stable host name.
        """
        domain = f"{self.owner.name}-trainer.{self.owner.namespace}.svc:{GRPC_PORT}"
        return [
            from_field("NEXRL_REPLICA", f"metadata.labels['{REPLICA_LABEL}']"),
            from_field("NEXRL_JOB", f"metadata.labels['{JOB_LABEL}']"),  # not the attempt: all attempts render alike
            variable("NEXRL_INSTANCE", "trainer-$(NEXRL_REPLICA)"),
            variable(
                "NEXRL_TRAINER_REPLICAS", ",".join(f"$(NEXRL_JOB)-{index}.{domain}" for index in range(1, replicas))
            ),
        ]

    def _workload(self, api_version: str, kind: str, component: str, suffix: str) -> Object:
        item = self.owner.new_object(api_version, kind, component, suffix)
        item["metadata"]["annotations"] = {REVISION: template_revision(self.experiment, component)}
        return item

    def _pods(self) -> PodTemplates:
        return PodTemplates(self.owner, self.experiment, self.settings)
