"""A client for the Kubernetes API: get, list, watch, server-side apply, delete. Objects are plain mappings."""

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException

from nexrl.errors import FailedPreconditionError, NexrlError

Object = dict[str, Any]
REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 10.0
EXEC_PROTOCOL = "v4.channel.k8s.io"
STDOUT, STDERR, STATUS = b"\x01", b"\x02", b"\x03"
"""First byte of a message of EXEC_PROTOCOL."""
MAX_ERRORS = 4000
"""Bytes of standard error that are kept of a command."""
FIELD_MANAGER = "nexrl-operator"


class ApiError(NexrlError):
    """The API server refused a request. `code` is the HTTP status; `reason` is for example 'Conflict' or 'Invalid'."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class Kind:
    """One kind of object, and its path in the API."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of a namespace's objects ("": all namespaces), of one object, or of a subresource."""
        prefix = "/apis/" if "/" in self.api_version else "/api/"
        parts = ["namespaces", namespace] if namespace else []
        parts += [self.plural, *filter(None, [name, subresource])]
        return f"{prefix}{self.api_version}/{'/'.join(parts)}"


EXPERIMENT = Kind("nexrl.dev/v1alpha1", "Experiment", "experiments")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
POD = Kind("v1", "Pod", "pods")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
JOB = Kind("batch/v1", "Job", "jobs")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
EVENT = Kind("v1", "Event", "events")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
CERTIFICATE = Kind("cert-manager.io/v1", "Certificate", "certificates")
WORKLOAD = Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
RESOURCE_FLAVOR = Kind("kueue.x-k8s.io/v1beta2", "ResourceFlavor", "resourceflavors")
KINDS = {
    kind.kind: kind
    for kind in (
        *(EXPERIMENT, CONFIG_MAP, SECRET, SERVICE, CLAIM, POD, DEPLOYMENT, STATEFUL_SET, JOB, LEASE, EVENT),
        *(NETWORK_POLICY, DISRUPTION_BUDGET, CERTIFICATE, WORKLOAD),
    )
}


class Api:
    """A connection to one API server. Raises ApiError if the server refuses, aiohttp errors if it cannot be reached."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        """The namespace of the kubeconfig's context, or of this pod."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        try:
            return await self.request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str = "", **query: Any) -> Object:
        """Return one page of a list."""
        return await self.request("GET", kind.path(namespace), query=query)

    async def apply(
        self, item: Mapping[str, Any], *, subresource: str = "", manager: str = FIELD_MANAGER, dry_run: bool = False
    ) -> Object:
        """Apply the fields of `item` (server-side apply). Fields of other managers stay.

        With `dry_run`, the server validates the object and changes nothing.
        """
        kind, metadata = KINDS[item["kind"]], item["metadata"]
        path = kind.path(metadata.get("namespace", self.namespace), metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true", **({"dryRun": "All"} if dry_run else {})}
        return await self.request("PATCH", path, query=query, body=item, content_type="application/apply-patch+yaml")

    async def create(self, item: Mapping[str, Any]) -> Object:
        """Create an object that does not exist yet."""
        kind, namespace = KINDS[item["kind"]], item["metadata"].get("namespace", self.namespace)
        return await self.request("POST", kind.path(namespace), body=item)

    async def replace(self, item: Mapping[str, Any]) -> Object:
        """Replace an object. If it has a resourceVersion, only while that is the current one."""
        kind, metadata = KINDS[item["kind"]], item["metadata"]
        return await self.request("PUT", kind.path(metadata["namespace"], metadata["name"]), body=item)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Change the fields in `patch`. None removes a field."""
        path = kind.path(namespace, name)
        return await self.request("PATCH", path, body=patch, content_type="application/merge-patch+json")

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str = "") -> bool:
        """Delete an object and, in the background, the objects it owns. Return False if it did not exist.

        With `uid`, delete only the object with this uid, not a newer one of the same name.
        """
        try:
            body: Object = {"propagationPolicy": "Background"}
            if uid:
                body["preconditions"] = {"uid": uid}
            await self.request("DELETE", kind.path(namespace, name), body=body)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        return True

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send a request and return the JSON of its response. Raises ApiError, or TimeoutError (REQUEST_SECONDS)."""
        async with self._sent(method, path, query, body, content_type) as response:
            text = await response.text()
        found: Object = json.loads(text)
        return found

    async def text(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """Yield the lines of a text response as they arrive, for example the log of a container."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        async with self._sent("GET", path, query, None, "application/json", limits) as response:
            async for line in response.content:
                yield line

    async def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> AsyncIterator[bytes]:
        """Run a command in a container and yield its standard output.

        Raises FailedPreconditionError with its standard error if it fails, and ConnectionError if it is cut off.
        """
        query = [*(("command", part) for part in command), ("container", container), ("stdout", "true")]
        method, url, headers, _, _ = await self._client.param_serialize(
            "GET",
            POD.path(namespace, pod, "exec"),
            query_params=[*query, ("stderr", "true")],
            header_params={},
            auth_settings=["BearerToken"],
        )
        rest = self._client.rest_client
        rest.pool_manager = rest.pool_manager or rest._create_pool_manager()  # as its WsApiClient does
        upgraded = rest.pool_manager.ws_connect(
            url, method=method, headers=headers, protocols=[EXEC_PROTOCOL], max_msg_size=0, heartbeat=REQUEST_SECONDS
        )
        try:
            async with upgraded as socket:
                async for content in _standard_output(socket):
                    yield content
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, "", f"pod {pod}: exec was refused: {error.message}") from None

    async def watch(
        self, kind: Kind, namespace: str, *, silence_seconds: float, **query: Any
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield (type, object) for each change until the server ends the watch.

        Raises TimeoutError after `silence_seconds` without a message, because a broken connection is silent, too.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        query = {"watch": "true", "allowWatchBookmarks": "true", **query}
        path = kind.path(namespace)
        async with self._sent("GET", path, query, None, "application/json", limits) as response:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"])
                yield event["type"], event["object"]

    @asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
        limits: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        method, url, headers, _, _ = await self._client.param_serialize(
            method, path, query_params=dict(query or {}), header_params=headers, auth_settings=["BearerToken"]
        )
        answer = await self._client.rest_client.request(
            method, url, headers, body, None, limits or aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        )
        response: aiohttp.ClientResponse = answer.response
        async with response:
            if response.status >= 400:
                raise _error(_status(await response.text(), response.status))
            try:
                yield response
            finally:
                # Abort the connection of a watch: closing TLS waits 30 s for a peer that no longer answers.
                if response.connection and response.connection.transport:
                    response.connection.transport.abort()


@asynccontextmanager
async def connect_cluster() -> AsyncIterator[Api]:
    """Connect to the cluster of KUBECONFIG (or ~/.kube/config), or of this pod. Raises FailedPreconditionError."""
    configuration = Configuration()
    # Else each request reads the environment and ~/.netrc again, and sends the API server a password from there.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
    try:
        namespace = await _configure(configuration)
    except (ConfigException, OSError) as error:
        raise FailedPreconditionError(f"no cluster: {error}; set KUBECONFIG") from None
    async with ApiClient(configuration) as client:
        yield Api(client, namespace)


async def _configure(configuration: Configuration) -> str:
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(configuration)
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()  # noqa: ASYNC240
    file_name = _kubeconfig()
    await config.load_kube_config(file_name, client_configuration=configuration)
    _, active = config.list_kube_config_contexts(file_name)
    return str(active["context"].get("namespace", "default"))


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def _status(text: str, code: int) -> Object:
    try:
        found: Object = json.loads(text)
        return found
    except ValueError:
        return {"code": code, "reason": "", "message": text[:1000]}


async def _standard_output(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[bytes]:
    errors = b""
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY:  # the connection was lost
            break
        channel, content = message.data[:1], message.data[1:]
        if channel == STDOUT:
            yield content
        elif channel == STDERR:
            errors = (errors + content)[-MAX_ERRORS:]
        elif channel == STATUS:
            status = json.loads(content)
            if status["status"] != "Success":
                why = errors.decode(errors="replace").strip() or status.get("message", "no reason given")
                raise FailedPreconditionError(f"the command in the pod failed: {why}")
            return
    raise ConnectionError("the connection to the command in the pod was cut off")


def _error(status: Mapping[str, Any]) -> ApiError:
    return ApiError(status.get("code", 0), status.get("reason", ""), status.get("message", ""))
