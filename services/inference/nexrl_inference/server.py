"""Starts an inference replica."""

import asyncio
from collections.abc import Mapping

import torch
from aiohttp import web

from nexrl.errors import FailedPreconditionError
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.v1 import policy_pb2
from nexrl.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from nexrl.weights.manifest import refuse_misfit, refuse_other_base
from nexrl.weights.published import PublishedVersions
from nexrl.weights.receiver import WeightReceiver
from nexrl_inference.adapted_engine import with_adapter
from nexrl_inference.backend import Backend, StartBackend
from nexrl_inference.builtin import backend as builtin
from nexrl_inference.fixed_weights import INITIAL, fixed_weights
from nexrl_inference.replica import Replica
from nexrl_inference.service import InferenceServicer
from nexrl_inference.vllm import backend as vllm

BACKENDS: Mapping[str, StartBackend] = {"builtin": builtin.start, "vllm": vllm.start}
"""By the value of `inference.backend`."""


def main() -> None:
    """Entry point of `nexrl serve inference`."""
    run_service("inference", start)


async def start(process: ServiceProcess) -> None:
    """Start a backend without weights, register with weight sync, and report ready when a version is committed.

    With NEXRL_WEIGHTS the replica serves those weights and takes no part in weight sync.
    """
    spec = process.experiment.spec
    torch.set_num_threads(spec.inference.threads)
    identity = policy_pb2.Replica(
        replica_id=process.settings.instance, address=process.address, token_address=process.token_address
    )
    backend = await BACKENDS[spec.inference.backend](process)
    if spec.model.lora is not None:
        backend = await asyncio.to_thread(with_adapter, backend, spec.model)
    replica = await _serve(process, backend, identity)
    process.add(add_InferenceServiceServicer_to_server, InferenceServicer(replica), "nexrl.v1.InferenceService")
    weights = process.settings.weights
    if weights:
        staged = await asyncio.to_thread(fixed_weights, spec.model, weights, backend.allocate)
        if spec.model.lora is not None and weights != INITIAL:
            refuse_misfit(staged.manifest, backend.tensors)
            refuse_other_base(staged.manifest, backend.base_digest)
        await replica.serve(staged)
    else:
        process.spawn(replica.keep_registered(process.connect(process.settings.weight_sync), spec.model.tag))
    process.spawn(_ready_when_committed(process, replica))


async def _serve(process: ServiceProcess, backend: Backend, identity: policy_pb2.Replica) -> Replica:
    """Build the replica and its HTTP API, and wait until the backend accepts requests."""
    identity.gpu = backend.gpu.uuid if backend.gpu else ""
    receiver = WeightReceiver(backend.tensors, backend.allocate, backend.base_digest, backend.gpu)
    process.on_close(lambda: asyncio.to_thread(receiver.close))
    replica = Replica(backend.engine, receiver, identity, PublishedVersions.of(process.experiment))
    identity.http_url = await serve_http(process, backend.application(replica))
    await backend.wait_started()
    return replica


async def serve_http(process: ServiceProcess, application: web.Application) -> str:
    """Serve `application` on the settings' HTTP port and return its base URL.

    Raises FailedPreconditionError when the port cannot be bound.
    """
    context = process.secure_http(application)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    process.on_close(runner.cleanup)
    host, port = process.settings.host, process.settings.http_port
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
    except OSError as error:
        raise FailedPreconditionError(
            f"http_port: cannot bind {host}:{port}: {error.strerror}; choose another (NEXRL_HTTP_PORT)"
        ) from None
    scheme = "https" if context else "http"
    return f"{scheme}://{process.settings.advertised}:{runner.addresses[0][1]}"


async def _ready_when_committed(process: ServiceProcess, replica: Replica) -> None:
    await replica.wait_committed()
    await process.set_ready()
