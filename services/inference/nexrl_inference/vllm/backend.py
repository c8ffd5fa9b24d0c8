"""Starts vLLM as a child process."""

import asyncio

import torch

from nexrl.errors import UnavailableError
from nexrl.models import build_empty_model, iter_weights
from nexrl.rpc.server import ServiceProcess
from nexrl.spec.model import ModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.weights.manifest import TensorSpec
from nexrl.weights.packing import tensor_specs
from nexrl_inference.backend import Backend, text_decoder
from nexrl_inference.vllm.api import vllm_api
from nexrl_inference.vllm.engine import VllmEngine
from nexrl_inference.vllm.server import VllmServer, start_vllm


async def start(process: ServiceProcess) -> Backend:
    """Start a vLLM server, which ends with this process. Raises FailedPreconditionError without vLLM."""
    spec = process.experiment.spec
    server = await start_vllm(spec, process.settings.gpu_share)
    process.on_close(server.close)
    process.spawn(server.wait_ended())
    tokenizer = await asyncio.to_thread(build_tokenizer, spec.model)
    engine = VllmEngine(server, spec, [tokenizer.eos_token_id], text_decoder(tokenizer))
    return Backend(
        engine=engine,
        tensors=await asyncio.to_thread(_tensors, spec.model),
        allocate=engine.allocate,
        application=lambda replica: vllm_api(replica, server),
        wait_started=lambda: _wait_started(process, server),
    )


async def _wait_started(process: ServiceProcess, server: VllmServer) -> None:
    """Wait until vLLM answers. Raises UnavailableError when vLLM ends, or the process is told to stop, before that."""
    waits = asyncio.create_task(server.wait_until_it_answers()), asyncio.create_task(process.stopping.wait())
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    if not waits[0].done():
        raise UnavailableError("the process was told to stop before vLLM answered")
    await waits[0]


def _tensors(model: ModelSpec) -> tuple[TensorSpec, ...]:
    with torch.device("meta"):  # takes no memory for weights
        return tensor_specs(iter_weights(build_empty_model(model)))
