"""Fakes for a bare API server: Kubernetes' controllers and kubelet. Also runs the controllers of experiments."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from nexrl.k8s.api import DEPLOYMENT, JOB, POD, STATEFUL_SET, Api, ApiError, Kind
from nexrl.rpc.client import connect
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.spec import Experiment
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.activity_service_pb2_grpc import add_ActivityServiceServicer_to_server
from nexrl.v1.controller_service_pb2_grpc import add_ControllerServiceServicer_to_server
from nexrl.v1.trajectory_pool_service_pb2_grpc import add_TrajectoryPoolServiceServicer_to_server
from nexrl_controller.activity import Module
from nexrl_controller.controller import Controller
from nexrl_controller.service import ActivityServicer, ControllerServicer
from nexrl_controller.state import State
from nexrl_operator.settings import OperatorSettings
from nexrl_operator.work_queue import Key

if TYPE_CHECKING:  # to type checkers the generated class is abstract; a fake has only the methods it needs
    from builtins import object as TrajectoryPoolServiceServicer  # noqa: N812
else:
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceServicer

Object = dict[str, Any]
PLAY_SECONDS = 0.1


def operator_settings(**values: Any) -> OperatorSettings:
    """Return an operator's settings for tests. `values` replaces some of them."""
    images = {f"image_{name}": f"test/{name}:1" for name in ("control", "rollout", "trainer", "inference", "vllm")}
    known: Object = {"redis_url": "redis://redis:6379", "pod_name": "operator-0", "release_namespace": "default"}
    return OperatorSettings(**{**images, **known, "disruption_budgets": True, **values})


def experiment_object(name: str, namespace: str = "default", **sections: Any) -> Object:
    """Return a small experiment. `sections` replaces sections of its spec."""
    spec = {
        "model": {"scratch": {"alphabet": "0123456789", "maxPositions": 32}},
        "data": {"type": "mock"},
        "rollout": {"maxNewTokens": 8},
        "inference": {"maxTokensPerRow": 32},
        "trainer": {"steps": 4},
        **sections,
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": metadata, "spec": spec}


class Kubelet:
    """Creates the pods of workloads, and deletes the pods of deleted workloads. New pods are ready at once."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self.is_ready = True
        """Whether new pods become ready."""

    async def play(self) -> None:
        """Create and delete pods until the task is cancelled."""
        while True:
            try:
                await self._round()
            except ApiError as error:
                if error.code not in (404, 409):
                    raise
            await asyncio.sleep(PLAY_SECONDS)

    async def fail(self, pod_name: str, exit_code: int, message: str = "", *, is_evicted: bool = False) -> None:
        """Make the container of a Job's pod fail, and with it the Job."""
        pod = await self._api.get(POD, self._namespace, pod_name)
        assert pod is not None
        await self.end(pod_name, exit_code, message, is_evicted=is_evicted)
        await self.fail_job(pod["metadata"]["labels"]["batch.kubernetes.io/job-name"])

    async def end(self, pod_name: str, exit_code: int, message: str = "", *, is_evicted: bool = False) -> None:
        """Make the container of a pod fail."""
        ended = {"exitCode": exit_code, "message": message, "reason": "Error"}
        container = {**_container("nexrl"), "ready": False, "state": {"terminated": ended}}
        conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}] * is_evicted
        await self._set_status(
            POD, pod_name, {"phase": "Failed", "containerStatuses": [container], "conditions": conditions}
        )

    async def fail_job(self, job: str) -> None:
        """Make a Job fail, whatever its pod does."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        failed = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("FailureTarget", "Failed")]
        await self._set_status(JOB, job, {"conditions": failed, "failed": 1, "startTime": now})

    async def _round(self) -> None:
        wanted: dict[str, Object] = {}
        ended: set[str] = set()
        """Pods of Jobs that have ended: they stay, and are not created again."""
        for kind in (DEPLOYMENT, STATEFUL_SET, JOB):
            for item in (await self._api.list(kind, self._namespace))["items"]:
                wanted |= _pods(kind, item)
                ended |= _pods(kind, item).keys() if kind is JOB and item["status"].get("conditions") else set()
        pods = {pod["metadata"]["name"]: pod for pod in (await self._api.list(POD, self._namespace))["items"]}
        for name in pods.keys() - wanted.keys():
            await self._api.delete(POD, self._namespace, name)
        for name in wanted.keys() - pods.keys() - ended:
            await self._api.create(wanted[name])
        if self.is_ready:
            for name in wanted.keys() & pods.keys():
                if pods[name]["status"].get("phase", "Pending") == "Pending":
                    await self._set_status(POD, name, _running())

    async def _set_status(self, kind: Kind, name: str, status: Object) -> None:
        path = kind.path(self._namespace, name, "status")
        await self._api.request("PATCH", path, body={"status": status}, content_type="application/merge-patch+json")


def _pods(kind: Kind, item: Object) -> dict[str, Object]:
    name, spec = item["metadata"]["name"], item["spec"]
    count = spec.get("replicas", spec.get("parallelism", 1))
    made = {}
    for index in range(count):
        labels = dict(spec["template"]["metadata"]["labels"])
        if kind is STATEFUL_SET:
            labels["apps.kubernetes.io/pod-index"] = str(index)
        if kind is JOB:
            labels |= {"batch.kubernetes.io/job-name": name, "batch.kubernetes.io/job-completion-index": str(index)}
        pod_name = f"{name}-{index}"
        metadata = {"name": pod_name, "namespace": item["metadata"]["namespace"], "labels": labels}
        made[pod_name] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec["template"]["spec"]}
    return made


def _running() -> Object:
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [_container("nexrl")],
    }


def _container(name: str) -> Object:
    return {"name": name, "ready": True, "restartCount": 0, "image": "test", "imageID": "", "state": {"running": {}}}


class _Memory:
    """Stores the controller's state in memory instead of Redis."""

    def __init__(self) -> None:
        self.state: State | None = None

    async def load(self) -> State | None:
        return self.state

    async def save(self, state: State) -> None:
        self.state = state


class _Pool(TrajectoryPoolServiceServicer):
    async def AuditLedger(self, request: pool_pb.AuditLedgerRequest, context: Any) -> pool_pb.AuditLedgerResponse:
        samples = {"granted": 10, "trained": 8, "open": 0, "leased": 0, "grouping": 0, "ready": 0, "batched": 0}
        return pool_pb.AuditLedgerResponse(
            audits=[pool_pb.LedgerAudit(model_tag="default", samples=samples, dropped={"stale": 2})]
        )


class Services:
    """Real controllers of experiments in the test's process. An operator reaches them through `connect`."""

    def __init__(self) -> None:
        self.controllers: dict[Key, Controller] = {}
        self._addresses: dict[Key, str] = {}
        self._stores: dict[Key, _Memory] = {}

    def connect(self, key: Key, component: str) -> grpc.aio.Channel:
        """Return a channel to the services of an experiment."""
        return connect(self._addresses[key])

    @asynccontextmanager
    async def serving(self, document: Object) -> AsyncIterator[Controller]:
        """Run the controller of an experiment while the block runs. A later one continues from its state."""
        experiment = Experiment.model_validate_json(json.dumps(document))
        key = document["metadata"]["namespace"], document["metadata"]["name"]
        store = self._stores.setdefault(key, _Memory())
        controller = Controller(experiment, store, [], time.time)  # type: ignore[arg-type]  # it has the methods that Controller calls
        await controller.start()
        for name in ("trainer", "rollout-0", "inference-0", "weight-sync", "trajectory-pool"):
            await controller.heartbeat(Module(name, name.partition("-")[0]), [])
        server = grpc.aio.server(interceptors=[EdgeInterceptor()])
        add_ControllerServiceServicer_to_server(ControllerServicer(controller), server)
        add_ActivityServiceServicer_to_server(ActivityServicer(controller), server)
        add_TrajectoryPoolServiceServicer_to_server(_Pool(), server)  # type: ignore[arg-type]
        self._addresses[key] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self.controllers[key] = controller
        await server.start()
        try:
            yield controller
        finally:
            controller.end_watches()
            await server.stop(0)
