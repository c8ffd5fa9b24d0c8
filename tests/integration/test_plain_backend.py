"""The backend that docs/how-to/add-an-inference-backend.md shows, in a replica as `nexrl serve inference` builds it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import FailedPreconditionError
from nexrl.models import build_model, iter_weights
from nexrl.rpc.client import call, connect
from nexrl.tokenizers import build_tokenizer
from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub
from nexrl.weights.packing import snapshot
from nexrl.weights.receiver import StagedWeights
from nexrl_inference import server
from nexrl_inference.backend import text_decoder
from nexrl_inference.requests import GenerationRequest
from tests.support import plain_backend
from tests.support.patience import LIMIT_SECONDS
from tests.support.services import running_service, small_experiment

SPEC = small_experiment().spec
PROMPT = (1, 5, 6)
SAMPLING: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 6}


def weights(version: int, seed: int, tensors: int | None = None) -> StagedWeights:
    """Those of a seed, as a replica has received them; only the first `tensors`."""
    named = islice(iter_weights(build_model(SPEC.model, seed)), tensors)
    packed = snapshot(named, policy_version=version, bucket_bytes=2**20)
    return StagedWeights(f"sync-{version}", packed.manifest, packed.buffers, packed.manifest.digest)


def engine() -> plain_backend.PlainEngine:
    tokenizer = build_tokenizer(SPEC.model)
    model = build_model(SPEC.model, 99)
    return plain_backend.PlainEngine(model, tokenizer.eos_token_id, text_decoder(tokenizer), 32)


@pytest.fixture
async def builtin(tmp_path: Path) -> AsyncIterator[pb.GenerateResponse]:
    """What the built-in engine answers."""
    async with running_service(tmp_path, server.start, weights="initial") as process:
        yield await answer_of(process.address)


async def answer_of(address: str) -> pb.GenerateResponse:
    async with connect(address) as channel:
        request = pb.GenerateRequest(request_id="r", prompt_token_ids=PROMPT, n=2, seeds=[3, 4], **SAMPLING)
        return await call(InferenceServiceStub(channel).Generate, request, timeout_seconds=LIMIT_SECONDS)


async def test_a_replica_with_the_backend_answers_as_one_with_the_built_in_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builtin: pb.GenerateResponse
) -> None:
    monkeypatch.setattr(server, "BACKENDS", {"builtin": plain_backend.start})
    async with running_service(tmp_path, server.start, weights="initial") as process:
        answer = await answer_of(process.address)
    for own, known in zip(answer.completions, builtin.completions, strict=True):
        assert own.token_ids == known.token_ids
        assert own.policy_versions == known.policy_versions
        assert own.finish_reason == known.finish_reason
        assert own.logprobs == pytest.approx(known.logprobs, abs=1e-5)


async def test_nothing_is_served_before_a_load_and_after_one_that_failed() -> None:
    plain, request = engine(), GenerationRequest("r", PROMPT, max_new_tokens=2)
    with pytest.raises(FailedPreconditionError, match="no policy version"):
        await plain.generate(request)
    await plain.load(weights(3, seed=1))
    assert set((await plain.generate(request)).completions[0].policy_versions) == {3}
    whole = weights(4, seed=2)
    with pytest.raises(KeyError):
        await plain.load(weights(4, seed=2, tensors=3))
    with pytest.raises(FailedPreconditionError, match="no policy version"):
        await plain.generate(request)
    await plain.load(whole)
    assert set((await plain.generate(request)).completions[0].policy_versions) == {4}


async def test_a_load_waits_for_the_request_in_flight() -> None:
    plain = engine()
    await plain.load(weights(0, seed=1))
    request = GenerationRequest("r", PROMPT, max_new_tokens=24, seeds=(5,))
    result, _ = await asyncio.gather(plain.generate(request), plain.load(weights(1, seed=2)))
    assert set(result.completions[0].policy_versions) == {0}
    assert set((await plain.generate(request)).completions[0].policy_versions) == {1}


async def test_a_completion_goes_on_as_it_would_have_and_ends_where_it_must() -> None:
    plain = engine()
    await plain.load(weights(0, seed=1))
    whole = (await plain.generate(GenerationRequest("r", PROMPT, seeds=(6,), **SAMPLING))).completions[0]
    assert len(whole.token_ids) >= 2
    continued = GenerationRequest("r", (*PROMPT, whole.token_ids[0]), seeds=(6,), drawn_tokens=1, **SAMPLING)
    rest = (await plain.generate(replace(continued, max_new_tokens=7))).completions[0]
    assert rest.token_ids == whole.token_ids[1:]
    stopping = GenerationRequest("r", PROMPT, seeds=(6,), stop_token_ids=(whole.token_ids[0],), **SAMPLING)
    stopped = (await plain.generate(stopping)).completions[0]
    assert (stopped.token_ids, stopped.finish_reason) == (whole.token_ids[:1], "stop")
    full = await plain.generate(GenerationRequest("r", (1,) + (5,) * 30, max_new_tokens=8))
    assert len(full.completions[0].token_ids) == 1
