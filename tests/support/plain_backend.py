"""The smallest inference backend, quoted by docs/how-to/add-an-inference-backend.md: no cache, one token at a time."""

import asyncio
import random

import torch
from transformers import PreTrainedModel

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.models import build_empty_model, iter_weights
from nexrl.rpc.server import ServiceProcess
from nexrl.stop_strings import Decode, ends_with_stop
from nexrl.tokenizers import build_tokenizer
from nexrl.weights.packing import allocate, tensor_specs
from nexrl.weights.receiver import StagedWeights
from nexrl_inference.backend import Backend, text_decoder
from nexrl_inference.builtin.openai_api import OpenAIApi
from nexrl_inference.builtin.sampling import SamplingBatch, sample_tokens, uniforms
from nexrl_inference.requests import Completion, FinishReason, GenerationRequest, GenerationResult


async def start(process: ServiceProcess) -> Backend:
    """Build the model without weights."""
    spec = process.experiment.spec
    tokenizer = await asyncio.to_thread(build_tokenizer, spec.model)
    model = await asyncio.to_thread(build_empty_model, spec.model)
    engine = PlainEngine(model.eval(), tokenizer.eos_token_id, text_decoder(tokenizer), spec.max_sequence_tokens)
    return Backend(
        engine=engine,
        tensors=tensor_specs(iter_weights(model)),
        allocate=allocate,
        application=lambda replica: OpenAIApi(replica, tokenizer, spec.model.tag).application(),
        wait_started=engine.wait_started,
    )


class PlainEngine:
    """Serves one request at a time. A load waits until the request in flight has ended."""

    def __init__(self, model: PreTrainedModel, eos_token_id: int, decode: Decode, max_tokens: int) -> None:
        self._model, self._eos, self._decode, self._max_tokens = model, eos_token_id, decode, max_tokens
        self._version: int | None = None
        self._turn = asyncio.Lock()
        self._requests = 0

    @property
    def active_rows(self) -> int:
        return min(self._requests, 1)

    @property
    def waiting_requests(self) -> int:
        return self._requests - self.active_rows

    async def wait_started(self) -> None:
        """The engine accepts requests at once."""

    async def load(self, weights: StagedWeights) -> None:
        async with self._turn:
            self._version = None  # if the copy fails half-way, nothing is served
            tensors = weights.tensors()
            for name, tensor in iter_weights(self._model):
                tensor.copy_(tensors[name])
            self._version = weights.policy_version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if len(request.prompt_ids) >= self._max_tokens:
            raise InvalidArgumentError(
                f"the prompt has {len(request.prompt_ids)} tokens; at most {self._max_tokens - 1}"
            )
        seeds = request.seeds or tuple(random.getrandbits(62) for _ in range(request.n))
        self._requests += 1
        try:
            async with self._turn:
                completions = [await self._complete(request, seed) for seed in seeds]
        finally:
            self._requests -= 1
        return GenerationResult(request.request_id, request.prompt_ids, tuple(completions))

    async def _complete(self, request: GenerationRequest, seed: int) -> Completion:
        if self._version is None:
            raise FailedPreconditionError("no policy version is served here yet")
        drawn = list(request.prompt_ids[len(request.prompt_ids) - request.drawn_tokens :])
        logprobs: list[float] = []
        finish_reason: FinishReason | None = None
        while finish_reason is None:  # a cancelled call stops between two tokens
            token_id, logprob = await asyncio.to_thread(self._draw, request, seed, drawn)
            drawn.append(token_id)
            logprobs.append(logprob)
            finish_reason = self._finish_reason(request, drawn)
        token_ids = tuple(drawn[request.drawn_tokens :])
        return Completion(token_ids, tuple(logprobs), (self._version,) * len(token_ids), finish_reason, seed)

    @torch.inference_mode()
    def _draw(self, request: GenerationRequest, seed: int, drawn: list[int]) -> tuple[int, float]:
        """Draw the next token from the truncated distribution. Also returns the token's log-probability in it."""
        context = [*request.prompt_ids, *drawn[request.drawn_tokens :]]
        logits_BV = self._model(torch.tensor([context])).logits[:, -1]
        settings = SamplingBatch(
            temperature_B=torch.tensor([request.temperature]),
            top_p_B=torch.tensor([request.top_p]),
            top_k_B=torch.tensor([request.top_k]),
            uniforms_B=torch.from_numpy(uniforms([seed], [len(drawn)])),
        )
        token_B, logprob_B = sample_tokens(logits_BV, settings)
        return int(token_B[0]), float(logprob_B[0])

    def _finish_reason(self, request: GenerationRequest, drawn: list[int]) -> FinishReason | None:
        if drawn[-1] in (self._eos, *request.stop_token_ids) or ends_with_stop(drawn, request.stop, self._decode):
            return "stop"
        new = len(drawn) - request.drawn_tokens
        is_full = new == request.max_new_tokens or len(request.prompt_ids) + new == self._max_tokens
        return "length" if is_full else None
