"""vLLM as the engine of a replica: token ids in, token ids with log-probabilities and versions out."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from nexrl.cancellation import is_called_off
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.spec import ExperimentSpec
from nexrl.weights.manifest import Manifest
from nexrl.weights.packing import fits
from nexrl.weights.receiver import StagedWeights
from nexrl.weights.shared import LOADED, SharedBuffers, manifest_to_json
from nexrl_inference.requests import Completion, FinishReason, GenerationRequest, GenerationResult
from nexrl_inference.vllm_server import VllmServer, row_tokens

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NOT_WHOLE = "the replica's weights are not whole: a weight sync failed half-way; ask another"


class VllmEngine:
    """Samples with a vLLM server, which serves nothing before a version is loaded, nor after one half loaded."""

    def __init__(self, server: VllmServer, spec: ExperimentSpec, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids` end a completion, beside the model's own."""
        self._server = server
        self._workers = spec.inference.tensor_parallel * spec.inference.data_parallel
        self._rows = spec.inference.max_rows * spec.inference.data_parallel
        self._row_tokens = row_tokens(spec)
        self._eos_token_ids = tuple(eos_token_ids)
        self._in_flight: str = spec.weight_sync.in_flight
        self._load_seconds = spec.weight_sync.timeout_seconds
        self._seeds = random.Random(spec.inference.seed)
        self._version = -1
        self._is_whole = False
        self._calls: set[asyncio.Task[Completion]] = set()
        self._spare: SharedBuffers | None = None

    @property
    def active_rows(self) -> int:
        """Completions being generated: as many as vLLM's engines decode together."""
        return min(len(self._calls), self._rows)

    @property
    def waiting_requests(self) -> int:
        """Completions that wait for a place in vLLM."""
        return len(self._calls) - self.active_rows

    def allocate(self, manifest: Manifest) -> Sequence[Tensor]:
        """Memory for a version that vLLM's workers can map: that of one which was loaded, if it fits."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and fits(spare, manifest) else SharedBuffers(manifest)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample completions; a cancelled call ends in vLLM, too.

        Raises InvalidArgumentError for a request that does not fit, FailedPreconditionError before a first version is
        served, UnavailableError when vLLM is gone or its weights are not whole.
        """
        room = self._row_tokens - len(request.prompt_ids)
        if room < 1:
            raise InvalidArgumentError(
                f"the prompt has {len(request.prompt_ids)} tokens; with one generated token it must fit "
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
            if is_called_off():
                raise
            raise UnavailableError(NOT_WHOLE) from None  # it was cut off by `load`, not by who asked
        finally:
            for call in calls:
                call.cancel()
            self._calls.difference_update(calls)
        return GenerationResult(request.request_id, request.prompt_ids, tuple(completions))

    async def load(self, weights: StagedWeights) -> None:
        """Serve `weights`. What is in flight goes on with them (keep, abort) or ends before (wait).

        Raises UnavailableError when they could not be loaded whole. Whatever is in flight gets it then, too, and so
        does who asks, until a load succeeds. Not to be called while another load is on.
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
        """Have vLLM load a version, and serve it unless a worker has failed; gives why."""
        post, update = self._server.post, {"path": buffers.path, "manifest": manifest_to_json(manifest)}
        buffers.forget_verdicts()
        try:
            async with asyncio.timeout(self._load_seconds):
                # With cleared caches what is in flight is computed again: its log-probabilities are the new weights'.
                await post(f"/pause?mode={self._in_flight}&clear_cache=true")
                await post("/start_weight_update")
                await post("/update_weights", {"update_info": update})
                verdicts = {verdict or "a worker has said nothing" for verdict in buffers.verdicts(self._workers)}
                failures = sorted(verdicts - {LOADED})
                await post(
                    "/finish_weight_update", {} if failures else {"weight_version": str(manifest.policy_version)}
                )
                if not failures:
                    await post("/resume")
        except BaseException as error:  # nobody knows what its workers have done of it
            self._server.kill()
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"vLLM has not loaded a version within {self._load_seconds:g} s") from None
            raise
        return failures

    async def _complete(self, request: GenerationRequest, seed: int) -> Completion:
        """One completion, in as many parts as weight syncs that abort what is in flight make of it."""
        done = Completion((), (), (), "abort", None if request.drawn_tokens else seed)
        while done.finish_reason == "abort":
            part = await self._draw(request, seed, done)
            done = Completion(
                done.token_ids + part.token_ids,
                done.logprobs + part.logprobs,
                done.policy_versions + part.policy_versions,
                part.finish_reason,
                done.seed if not done.token_ids else None,  # in parts, its seed alone does not draw it again
            )
        return done

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
        raise UnavailableError(f"vLLM names the versions of {len(versions)} of {tokens} tokens")
    return versions


def _seed_after(seed: int, drawn_tokens: int) -> int:
    """vLLM cannot go on in the middle of a seed's random numbers: what follows has a seed of its own."""
    if not drawn_tokens:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {drawn_tokens}".encode(), digest_size=8).digest()) >> 2
