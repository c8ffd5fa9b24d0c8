"""Starts the built-in engine."""

import asyncio
from typing import Any

from nexrl.device import choose_device, exclude_cudnn_attention
from nexrl.models import build_empty_model, iter_weights
from nexrl.rpc.server import ServiceProcess
from nexrl.spec import ExperimentSpec
from nexrl.spec.inference import BuiltinInference
from nexrl.tokenizers import build_tokenizer
from nexrl.weights.gpu import gpu_for_transfer
from nexrl.weights.packing import allocate, tensor_specs
from nexrl_inference.backend import Backend, text_decoder
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.engine_thread import EngineThread
from nexrl_inference.builtin.openai_api import OpenAIApi
from nexrl_inference.builtin.scheduler import Limits


async def start(process: ServiceProcess) -> Backend:
    """Build the model without weights, and start the engine in a thread of its own."""
    exclude_cudnn_attention()
    spec = process.experiment.spec
    tokenizer = await asyncio.to_thread(build_tokenizer, spec.model)
    assert isinstance(spec.inference, BuiltinInference)
    device: Any = choose_device("inference.device", spec.inference.device)  # transformers has no type for it
    model = (await asyncio.to_thread(build_empty_model, spec.model)).to(device)
    engine = EngineThread(
        Engine(
            model,
            eos_token_ids=[tokenizer.eos_token_id],
            decode=text_decoder(tokenizer),
            limits=_limits(spec),
            seed=spec.inference.seed,
        )
    )
    await engine.__aenter__()
    process.on_close(engine.close)
    process.spawn(engine.wait_ended())
    return Backend(
        engine=engine,
        tensors=tensor_specs(iter_weights(model)),
        allocate=allocate,
        application=lambda replica: OpenAIApi(replica, tokenizer, spec.model.tag).application(),
        wait_started=_started,
        gpu=gpu_for_transfer(spec.weight_sync.transport, device),
    )


def _limits(spec: ExperimentSpec) -> Limits:
    return Limits(max_rows=spec.inference.max_rows, max_tokens_per_row=spec.max_sequence_tokens)


async def _started() -> None:
    """The engine accepts requests as soon as `start` returns."""
