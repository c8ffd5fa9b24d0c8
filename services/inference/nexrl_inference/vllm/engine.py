"""The engine of a replica on vLLM: token ids in, token ids with log-probabilities and versions out."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.spec import ExperimentSpec
from nexrl.spec.inference import VllmInference
from nexrl.stop_strings import Decode, ends_with_stop
from nexrl.task_cancellation import is_current_task_cancelled
from nexrl.weights.manifest import Manifest
from nexrl.weights.packing import fits
from nexrl.weights.receiver import StagedWeights
from nexrl_inference.requests import Completion, FinishReason, GenerationRequest, GenerationResult
from nexrl_inference.vllm.server import VllmServer
from nexrl_inference.vllm.shared import LOADED, SharedBuffers, manifest_to_json

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NOT_WHOLE = "the replica's weights are incomplete: a weight sync failed half-way; send the request to another replica"


class VllmEngine:
    """Samples with a vLLM server. It refuses requests before a version is loaded, and after a load that failed."""

    def __init__(self, server: VllmServer, spec: ExperimentSpec, eos_token_ids: Sequence[int], decode: Decode) -> None:
        """`eos_token_ids` end a completion, beside the model's own. `decode` finds stop strings."""
        self._server = server
        inference = spec.inference
        assert isinstance(inference, VllmInference)
        self._workers = inference.tensor_parallel * inference.data_parallel
        self._rows = inference.max_rows * inference.data_parallel
        self._row_tokens = spec.max_sequence_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._decode = decode
        self._in_flight: str = spec.weight_sync.in_flight
        self._load_seconds = spec.weight_sync.timeout_seconds
        self._seeds = random.Random(spec.inference.seed)
        self._version = -1
        self._is_whole = False
        self._calls: set[asyncio.Task[Completion]] = set()
        self._spare: SharedBuffers | None = None

    @property
    def active_rows(self) -> int:
        """Completions being generated, at most as many as vLLM's engines decode together."""
        return min(len(self._calls), self._rows)

    @property
    def waiting_requests(self) -> int:
        """Completions that wait in vLLM's queue."""
        return len(self._calls) - self.active_rows

    def allocate(self, manifest: Manifest) -> Sequence[Tensor]:
        """Return memory that vLLM's workers can map, for a version: that of the previous version if it fits."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and fits(spare, manifest) else SharedBuffers(manifest)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample completions. Cancelling the call cancels its requests in vLLM.

        Raises InvalidArgumentError for a request that does not fit, FailedPreconditionError before the first version is
        served, UnavailableError if vLLM has ended or its weights are incomplete.
        """
        room = self._row_tokens - len(request.prompt_ids)
        if room < 1:
            raise InvalidArgumentError(
                f"prompt_token_ids: {len(request.prompt_ids)} tokens; with one generated token it must fit "
                f"max_tokens_per_row = {self._row_tokens}"
            )
        if self._version < 0:
            raise FailedPreconditionError("no policy version is served here yet")
        self._require_whole()
        request = replace(request, max_new_tokens=min(request.max_new_tokens, room))
        seeds = request.seeds or tuple(self._seeds.getrandbits(62) for _ in range(request.n))
        calls = [asyncio.create_task(self._complete(request, seed)) for seed in seeds]
        self._calls.update(calls)
        try:
            completions = await asyncio.gather(*calls)
        except asyncio.CancelledError:
            if is_current_task_cancelled():
                raise
            raise UnavailableError(NOT_WHOLE) from None  # `load` cancelled it, not the caller
        finally:
            for call in calls:
                call.cancel()
            self._calls.difference_update(calls)
        return GenerationResult(request.request_id, request.prompt_ids, tuple(completions))

    async def load(self, weights: StagedWeights) -> None:
        """Serve `weights`. Completions in flight continue with them (keep, abort) or end first (wait).

        Raises UnavailableError if they could not be loaded completely. Then requests in flight and later requests raise
        it, too, until a load succeeds. Do not call it while another load runs.
        """
        assert isinstance(weights.buffers, SharedBuffers)
        try:
            failures = await self._load(weights.manifest, weights.buffers)
            if failures:
                raise UnavailableError(f"version {weights.policy_version} could not be loaded: {'; '.join(failures)}")
        except BaseException:
            self._is_whole = False
            for call in self._calls:
                call.cancel()
            raise
        self._version, self._is_whole, self._spare = weights.policy_version, True, weights.buffers

    async def _load(self, manifest: Manifest, buffers: SharedBuffers) -> list[str]:
        """Have vLLM load a version, and resume it if no worker failed. Returns the reasons of the failed workers."""
        post, update = self._server.post, {"path": buffers.path, "manifest": manifest_to_json(manifest)}
        buffers.forget_verdicts()
        try:
            async with asyncio.timeout(self._load_seconds):
                # Clearing the caches makes vLLM compute keys and values again, so that the next log-probabilities are
                # those of the new weights.
                await post(f"/pause?mode={self._in_flight}&clear_cache=true")
                await post("/start_weight_update")
                await post("/update_weights", {"update_info": update})
                verdicts = {verdict or "a worker has reported nothing" for verdict in buffers.verdicts(self._workers)}
                failures = sorted(verdicts - {LOADED})
                await post(
                    "/finish_weight_update", {} if failures else {"weight_version": str(manifest.policy_version)}
                )
                if not failures:
                    await post("/resume")
        except BaseException as error:  # the state of its workers is unknown
            self._server.kill()
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"vLLM has not loaded a version within {self._load_seconds:g} s") from None
            raise
        return failures

    async def _complete(self, request: GenerationRequest, seed: int) -> Completion:
        """Return one completion. Each weight sync that aborts requests in flight adds a part to it."""
        done = Completion((), (), (), "abort", None if request.drawn_tokens else seed)
        while done.finish_reason == "abort":
            part = self._until_stop(request, done, await self._draw(request, seed, done))
            done = Completion(
                done.token_ids + part.token_ids,
                done.logprobs + part.logprobs,
                done.policy_versions + part.policy_versions,
                part.finish_reason,
                done.seed if not done.token_ids else None,  # the seed alone cannot repeat a completion in parts
            )
        return done

    def _until_stop(self, request: GenerationRequest, done: Completion, part: Completion) -> Completion:
        """Return the part up to a stop string that began in an earlier part, which vLLM takes for the prompt."""
        earlier = request.prompt_ids[len(request.prompt_ids) - request.drawn_tokens :] + done.token_ids
        if not request.stop or not earlier:
            return part
        for count in range(1, len(part.token_ids) + 1):
            if ends_with_stop(earlier + part.token_ids[:count], request.stop, self._decode):
                return replace(
                    part,
                    token_ids=part.token_ids[:count],
                    logprobs=part.logprobs[:count],
                    policy_versions=part.policy_versions[:count],
                    finish_reason="stop",
                )
        return part

    async def _draw(self, request: GenerationRequest, seed: int, done: Completion) -> Completion:
        left = request.max_new_tokens - len(done.token_ids)
        if left == 0:  # aborted at its last token
            return replace(done, token_ids=(), logprobs=(), policy_versions=(), finish_reason="length")
        drawn = request.drawn_tokens + len(done.token_ids)
        body = {
            "token_ids": [*request.prompt_ids, *done.token_ids],
            "sampling_params": {
                "max_tokens": left,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "seed": _seed_after(seed, drawn),
                "stop_token_ids": [*self._eos_token_ids, *request.stop_token_ids],
                "stop": request.stop,
                "logprobs": 0,
            },
        }
        choice = (await self._server.post("/inference/v1/generate", body))["choices"][0]
        tokens = tuple(choice["token_ids"] or ())
        content = choice["logprobs"]["content"] if choice["logprobs"] else []
        return Completion(
            tokens,
            tuple(token["logprob"] for token in content),
            _versions(choice["weight_versions"] or [], len(tokens)),
            _finish_reason(choice["finish_reason"]),
        )

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise UnavailableError(NOT_WHOLE)


def _finish_reason(told: str) -> FinishReason:
    if told not in FINISH_REASONS:
        raise UnavailableError(f"vLLM ended a completion with {told!r}")
    return FINISH_REASONS[told]


def _versions(spans: Sequence[dict[str, Any]], tokens: int) -> tuple[int, ...]:
    versions = tuple(int(span["version"]) for span in spans for _ in range(span["start"], span["end"]))
    if len(versions) != tokens:
        raise UnavailableError(f"vLLM reported the versions of {len(versions)} of {tokens} tokens")
    return versions


def _seed_after(seed: int, drawn_tokens: int) -> int:
    """Return a new seed for a continued completion: vLLM cannot resume a seed's random numbers in the middle."""
    if not drawn_tokens:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {drawn_tokens}".encode(), digest_size=8).digest()) >> 2
