"""Starts an inference replica with the built-in engine."""

import asyncio

import torch
from aiohttp import web

from nexrl.errors import FailedPreconditionError
from nexrl.models import iter_weights
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.spec import ExperimentSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1 import policy_pb2
from nexrl.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from nexrl.weights.packing import tensor_specs
from nexrl.weights.receiver import StagedWeights, WeightReceiver
from nexrl_inference.engine import Engine
from nexrl_inference.engine_thread import EngineThread
from nexrl_inference.fixed_weights import build_with_weights
from nexrl_inference.openai_api import OpenAIApi
from nexrl_inference.replica import Replica
from nexrl_inference.scheduler import Limits
from nexrl_inference.service import InferenceServicer


def main() -> None:
    """Entry point of `nexrl serve inference`."""
    run_service("inference", start)


async def start(process: ServiceProcess) -> None:
    """Build the model without weights, join weight sync, and be ready when the first version is committed.

    With NEXRL_WEIGHTS: the model with these weights, which stay, and no weight sync.
    """
    spec, weights = process.experiment.spec, process.settings.weights
    torch.set_num_threads(spec.inference.threads)
    tokenizer = await asyncio.to_thread(build_tokenizer, spec.model)
    model, version = await asyncio.to_thread(build_with_weights, spec.model, weights)
    receiver = WeightReceiver(tensor_specs(iter_weights(model)))
    process.on_close(lambda: asyncio.to_thread(receiver.close))
    engine = EngineThread(
        Engine(model, eos_token_ids=[tokenizer.eos_token_id], limits=limits(spec), seed=spec.inference.seed)
    )
    await engine.__aenter__()
    process.on_close(engine.close)
    process.spawn(engine.wait_ended())
    identity = policy_pb2.Replica(replica_id=process.settings.instance, address=process.address)
    replica = Replica(engine, receiver, identity)
    identity.http_url = await serve_http(process, OpenAIApi(replica, tokenizer, spec.model.tag).application())
    process.add(add_InferenceServiceServicer_to_server, InferenceServicer(replica), "nexrl.v1.InferenceService")
    if weights:
        await replica.serve(StagedWeights(weights, version, "", dict(iter_weights(model))))
    else:
        process.spawn(replica.keep_registered(process.connect(process.settings.weight_sync), spec.model.tag))
    process.spawn(_ready_when_committed(process, replica))


def limits(spec: ExperimentSpec) -> Limits:
    """The engine's limits, as the experiment sets them."""
    positions = spec.model.scratch.max_positions if spec.model.scratch else spec.inference.max_tokens_per_row
    return Limits(
        max_rows=spec.inference.max_rows,
        max_tokens_per_row=min(spec.inference.max_tokens_per_row, positions),
    )


async def serve_http(process: ServiceProcess, application: web.Application) -> str:
    """Serve `application` on the settings' HTTP port; gives its base URL. Raises FailedPreconditionError."""
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    process.on_close(runner.cleanup)
    host, port = process.settings.host, process.settings.http_port
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise FailedPreconditionError(
            f"http_port: cannot bind {host}:{port}: {error.strerror}; choose another (NEXRL_HTTP_PORT)"
        ) from None
    return f"http://{host}:{runner.addresses[0][1]}"


async def _ready_when_committed(process: ServiceProcess, replica: Replica) -> None:
    await replica.wait_committed()
    await process.set_ready()
