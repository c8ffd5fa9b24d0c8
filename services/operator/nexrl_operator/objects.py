"""Names, labels and owner of the objects of an experiment. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

GROUP = "nexrl.dev"
API_VERSION, EXPERIMENT_KIND = f"{GROUP}/v1alpha1", "Experiment"
EXPERIMENT_LABEL = f"{GROUP}/experiment"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL, OPERATOR = "app.kubernetes.io/managed-by", "nexrl-operator"
ATTEMPT_LABEL = f"{GROUP}/attempt"
JOB_LABEL, REPLICA_LABEL = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
GRPC_PORT, TOKEN_PORT, HEALTH_PORT, HTTP_PORT, METRICS_PORT = 50051, 50052, 50053, 8000, 9090
DATA_READER_PORT = 50054
"""On the loopback interface of the trajectory pool's pods."""
RUN_FOLDER = Path("/var/lib/nexrl/run")
EXPERIMENT_FOLDER = Path("/etc/nexrl/experiment")
TLS_FOLDER = Path("/etc/nexrl/tls")


@dataclass(frozen=True)
class Owner:
    """The experiment that owns a set of objects in the cluster."""

    namespace: str
    name: str
    uid: str

    @property
    def ledger(self) -> str:
        """The name of the experiment's ledger in Redis.

        It contains the UID, so an experiment that is deleted and created again starts a new ledger.
        """
        return f"{self.namespace}.{self.name}.{self.uid[:8]}"

    def reference(self) -> Object:
        """Return the owner reference for the objects of the experiment."""
        return {
            "apiVersion": API_VERSION,
            "kind": EXPERIMENT_KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def address(self, component: str) -> str:
        """Return the gRPC address of a component's pods."""
        return f"dns:///{self.name}-{component}.{self.namespace}.svc:{GRPC_PORT}"

    def selector(self, component: str) -> Mapping[str, str]:
        """Return the labels that select the pods of a component of this experiment."""
        return {
            "app.kubernetes.io/name": "nexrl",
            "app.kubernetes.io/instance": self.name,
            COMPONENT_LABEL: component,
            EXPERIMENT_LABEL: self.name,
        }

    def labels(self, component: str) -> dict[str, str]:
        """Return all labels of an object of a component."""
        return {**self.selector(component), "app.kubernetes.io/part-of": "nexrl", MANAGED_BY_LABEL: OPERATOR}

    def new_object(self, api_version: str, kind: str, component: str, suffix: str) -> Object:
        """Return an object with metadata but no content. Its name is the experiment's name, "-" and `suffix`."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": f"{self.name}-{suffix}",
                "namespace": self.namespace,
                "labels": self.labels(component),
                "ownerReferences": [self.reference()],
            },
        }
