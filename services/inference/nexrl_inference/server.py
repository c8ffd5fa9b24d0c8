"""Starts an inference replica: the built-in engine, or vLLM."""

import asyncio

import torch
from aiohttp import web

from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.models import build_empty_model, iter_weights
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.spec import ExperimentSpec
from nexrl.spec.experiment import ModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1 import policy_pb2
from nexrl.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from nexrl.weights.manifest import TensorSpec
from nexrl.weights.packing import tensor_specs
from nexrl.weights.published import PublishedVersions
from nexrl.weights.receiver import WeightReceiver
from nexrl_inference.engine import Engine
from nexrl_inference.engine_thread import EngineThread
from nexrl_inference.fixed_weights import fixed_weights
from nexrl_inference.openai_api import OpenAIApi
from nexrl_inference.replica import Replica
from nexrl_inference.scheduler import Limits
from nexrl_inference.service import InferenceServicer
from nexrl_inference.vllm_api import vllm_api
from nexrl_inference.vllm_engine import VllmEngine
from nexrl_inference.vllm_server import VllmServer, row_tokens, start_vllm


def main() -> None:
    """Entry point of `nexrl serve inference`."""
    run_service("inference", start)


async def start(process: ServiceProcess) -> None:
    """Build the model without weights, join weight sync, and be ready when the first version is committed.

    With NEXRL_WEIGHTS: the model with these weights, which stay, and no weight sync.
    """
    spec = process.experiment.spec
    torch.set_num_threads(spec.inference.threads)
    identity = policy_pb2.Replica(
        replica_id=process.settings.instance, address=process.address, token_address=process.token_address
    )
    start_backend = _start_vllm if spec.inference.backend == "vllm" else _start_builtin
    replica = await start_backend(process, identity)
    process.add(add_InferenceServiceServicer_to_server, InferenceServicer(replica), "nexrl.v1.InferenceService")
    if process.settings.weights:
        await replica.serve(await asyncio.to_thread(fixed_weights, spec.model, process.settings.weights))
    else:
        process.spawn(replica.keep_registered(process.connect(process.settings.weight_sync), spec.model.tag))
    process.spawn(_ready_when_committed(process, replica))


async def _start_builtin(process: ServiceProcess, identity: policy_pb2.Replica) -> Replica:
    spec = process.experiment.spec
    tokenizer = await asyncio.to_thread(build_tokenizer, spec.model)
    model = await asyncio.to_thread(build_empty_model, spec.model)
    engine = EngineThread(
        Engine(model, eos_token_ids=[tokenizer.eos_token_id], limits=limits(spec), seed=spec.inference.seed)
    )
    await engine.__aenter__()
    process.on_close(engine.close)
    process.spawn(engine.wait_ended())
    receiver = WeightReceiver(tensor_specs(iter_weights(model)))
    process.on_close(lambda: asyncio.to_thread(receiver.close))
    replica = Replica(engine, receiver, identity, PublishedVersions.of(process.experiment))
    identity.http_url = await serve_http(process, OpenAIApi(replica, tokenizer, spec.model.tag).application())
    return replica


async def _start_vllm(process: ServiceProcess, identity: policy_pb2.Replica) -> Replica:
    spec = process.experiment.spec
    server = await start_vllm(spec)
    process.on_close(server.close)
    process.spawn(server.wait_ended())
    tokenizer = await asyncio.to_thread(build_tokenizer, spec.model)
    engine = VllmEngine(server, spec, [tokenizer.eos_token_id])
    receiver = WeightReceiver(await asyncio.to_thread(_weight_specs, spec.model), engine.allocate)
    process.on_close(lambda: asyncio.to_thread(receiver.close))
    replica = Replica(engine, receiver, identity, PublishedVersions.of(process.experiment))
    identity.http_url = await serve_http(process, vllm_api(replica, server))
    await _until_up(process, server)
    return replica


async def _until_up(process: ServiceProcess, server: VllmServer) -> None:
    """Wait for vLLM, but not after the process was told to stop, or vLLM has ended."""
    ends = asyncio.create_task(server.wait_until_it_answers()), asyncio.create_task(process.stopping.wait())
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    if not ends[0].done():
        raise UnavailableError("stopped before vLLM was up")
    await ends[0]


def _weight_specs(model: ModelSpec) -> tuple[TensorSpec, ...]:
    with torch.device("meta"):  # takes no memory for weights
        return tensor_specs(iter_weights(build_empty_model(model)))


def limits(spec: ExperimentSpec) -> Limits:
    """The engine's limits, as the experiment sets them."""
    return Limits(max_rows=spec.inference.max_rows, max_tokens_per_row=row_tokens(spec))


async def serve_http(process: ServiceProcess, application: web.Application) -> str:
    """Serve `application` on the settings' HTTP port; gives its base URL. Raises FailedPreconditionError."""
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
