"""A replica as a service: over gRPC, and over HTTP with OpenAI's own client."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from aiohttp import web
from torch import Tensor

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from nexrl.models import build_empty_model, build_model, iter_weights
from nexrl.rpc.client import call, connect
from nexrl.rpc.server import ServiceProcess
from nexrl.tokenizers import build_tokenizer
from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1 import policy_pb2
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from nexrl.weights.packing import allocate, snapshot, tensor_specs
from nexrl.weights.receiver import StagedWeights, WeightReceiver
from nexrl_inference import server
from nexrl_inference.backend import text_decoder
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.engine_thread import EngineThread
from nexrl_inference.builtin.openai_api import OpenAIApi
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.fixed_weights import fixed_weights
from nexrl_inference.replica import Replica
from nexrl_inference.requests import GenerationRequest
from nexrl_inference.service import InferenceServicer
from tests.support.patience import LIMIT_SECONDS
from tests.support.services import running_service, small_experiment

if TYPE_CHECKING:
    from nexrl.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

SPEC = small_experiment().spec


class PreparedReceiver(WeightReceiver):
    """Holds weights as if a broadcast had brought them."""

    def stage(self, sync_id: str, policy_version: int, tensors: Mapping[str, Tensor]) -> None:
        packed = snapshot(tensors.items(), policy_version=policy_version, bucket_bytes=2**20)
        self._staged = StagedWeights(sync_id, packed.manifest, packed.buffers, f"digest-{policy_version}")


@dataclass
class Deployed:
    """A replica without weights, its gRPC stub and its HTTP address."""

    receiver: PreparedReceiver
    stub: "InferenceServiceAsyncStub"
    url: str

    async def commit(self, policy_version: int, seed: int = 0) -> None:
        """Serve the weights of a seed as a policy version."""
        tensors = dict(iter_weights(build_model(SPEC.model, seed)))
        self.receiver.stage(f"sync-{policy_version}", policy_version, tensors)
        request = pb.CommitWeightsRequest(sync_id=f"sync-{policy_version}", policy_version=policy_version)
        await call(self.stub.CommitWeights, request, timeout_seconds=LIMIT_SECONDS)

    async def generate(self, **fields: Any) -> pb.GenerateResponse:
        """Generate; by default two samples of eight tokens."""
        values = {"request_id": "r", "prompt_token_ids": [1, 5, 6], "n": 2, "max_new_tokens": 8, "temperature": 1.0}
        return await call(self.stub.Generate, pb.GenerateRequest(**{**values, **fields}), timeout_seconds=LIMIT_SECONDS)


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Deployed]:
    model, tokenizer = build_empty_model(SPEC.model), build_tokenizer(SPEC.model)
    receiver = PreparedReceiver(tensor_specs(iter_weights(model)))
    engine = Engine(
        model,
        eos_token_ids=[tokenizer.eos_token_id],
        decode=text_decoder(tokenizer),
        limits=Limits(max_tokens_per_row=32),
        seed=0,
    )
    async with AsyncExitStack() as stack:
        thread = await stack.enter_async_context(EngineThread(engine))
        serving = Replica(thread, receiver, policy_pb2.Replica(replica_id="inference-0", address="127.0.0.1:1"))

        async def start(process: ServiceProcess) -> None:
            process.add(add_InferenceServiceServicer_to_server, InferenceServicer(serving), "nexrl.v1.InferenceService")

        process = await stack.enter_async_context(running_service(tmp_path, start))
        runner = web.AppRunner(OpenAIApi(serving, tokenizer, "default").application(), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        channel = await stack.enter_async_context(connect(process.address))
        yield Deployed(receiver, InferenceServiceStub(channel), f"http://127.0.0.1:{runner.addresses[0][1]}")


@pytest.fixture
async def client(replica: Deployed) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_nothing_is_generated_before_weights_are_committed(replica: Deployed) -> None:
    with pytest.raises(FailedPreconditionError):
        await replica.generate()
    state = await call(replica.stub.GetReplicaState, pb.GetReplicaStateRequest(), timeout_seconds=LIMIT_SECONDS)
    assert (state.replica.replica_id, state.replica.policy_version, state.replica.ready) == ("inference-0", -1, False)
    with pytest.raises(FailedPreconditionError, match="staged no weights"):
        await call(replica.stub.CommitWeights, pb.CommitWeightsRequest(sync_id="x"), timeout_seconds=LIMIT_SECONDS)


@pytest.mark.guide("F2", "G9", "L9", "L10")
async def test_completions_are_repeatable_by_seed_and_name_the_version_of_each_token(replica: Deployed) -> None:
    await replica.commit(3)
    first = await replica.generate(seeds=[7, 8])
    assert await replica.generate(seeds=[7, 8]) == first
    assert await replica.generate(seeds=[9, 10]) != first
    assert len(first.completions) == 2
    for completion in first.completions:
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.policy_versions) <= 8
        assert set(completion.policy_versions) == {3}
        assert all(logprob <= 0 for logprob in completion.logprobs)
        assert completion.finish_reason in ("stop", "length")
    await replica.commit(4, seed=1)
    changed = await replica.generate(seeds=[7, 8])
    assert set(changed.completions[0].policy_versions) == {4}
    assert changed.completions[0].logprobs != first.completions[0].logprobs
    await call(replica.stub.CommitWeights, pb.CommitWeightsRequest(sync_id="sync-4"), timeout_seconds=LIMIT_SECONDS)
    state = await call(replica.stub.GetReplicaState, pb.GetReplicaStateRequest(), timeout_seconds=LIMIT_SECONDS)
    assert (state.replica.policy_version, state.replica.ready, state.digest) == (4, True, "digest-4")


async def test_what_is_told_of_a_draw_draws_it_again_alone(replica: Deployed) -> None:
    await replica.commit(3)
    crowd = [replica.generate(request_id=str(i), n=8, max_new_tokens=20, temperature=1.5) for i in range(6)]
    for recorded in [completion for answer in await asyncio.gather(*crowd) for completion in answer.completions]:
        draw = recorded.draw
        (again,) = (
            await replica.generate(
                n=1, seeds=[draw.seed], temperature=draw.temperature, top_p=draw.top_p, max_new_tokens=20
            )
        ).completions
        assert (again.token_ids, again.draw) == (recorded.token_ids, draw)
        assert again.logprobs == pytest.approx(recorded.logprobs, abs=1e-4)


@pytest.mark.parametrize("version", [0, 7])
async def test_a_replica_of_fixed_weights_serves_them_without_weight_sync(tmp_path: Path, version: int) -> None:
    model = build_model(SPEC.model, SPEC.model.seed if version == 0 else 5)
    model.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "checkpoint.json").write_text(json.dumps({"metadata": {"step": version}}))
    weights = "initial" if version == 0 else str(tmp_path / "checkpoint")
    reference = Engine(model, eos_token_ids=[2], limits=Limits(max_tokens_per_row=32))
    reference.load_weights(dict(iter_weights(model)), version)
    reference.submit(GenerationRequest("r", (1, 5, 6), max_new_tokens=8, n=2, seeds=(3, 4)))
    results = []
    while not reference.is_idle:
        results += reference.step()
    async with running_service(tmp_path, server.start, weights=weights) as process, connect(process.address) as channel:
        replica = Deployed(PreparedReceiver([]), InferenceServiceStub(channel), "")
        answer = await replica.generate(seeds=[3, 4])
        state = await call(replica.stub.GetReplicaState, pb.GetReplicaStateRequest(), timeout_seconds=LIMIT_SECONDS)
    assert (state.replica.policy_version, state.replica.ready) == (version, True)
    assert [tuple(c.token_ids) for c in answer.completions] == [c.token_ids for c in results[0].completions]
    assert set(answer.completions[0].policy_versions) == {version}


def test_weights_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no checkpoint\.json"):
        fixed_weights(SPEC.model, str(tmp_path), allocate)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n: at least 1"),
        ({"prompt_token_ids": []}, "prompt_ids: at least one token"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"prompt_token_ids": [10_000]}, "prompt_token_ids: token 10000 is outside the vocabulary"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_by_name(
    replica: Deployed, fields: dict[str, Any], message: str
) -> None:
    await replica.commit(0)
    with pytest.raises(InvalidArgumentError, match=message):
        await replica.generate(**fields)


@pytest.mark.guide("F1", "Q34")
async def test_openais_client_completes_text_and_token_ids(replica: Deployed, client: openai.AsyncOpenAI) -> None:
    await replica.commit(2)
    text = await client.completions.create(model="default", prompt="12", max_tokens=4, n=2, seed=1)
    assert [choice.index for choice in text.choices] == [0, 1]
    assert text.usage is not None
    assert text.usage.prompt_tokens == 3  # with <bos>
    ids = await client.completions.create(model="default", prompt=[1, 5, 6], max_tokens=4, n=2, seed=1)
    assert [choice.text for choice in ids.choices] == [choice.text for choice in text.choices]
    assert ids.choices[0].model_extra is not None
    assert set(ids.choices[0].model_extra["policy_versions"]) == {2}
    assert [model.id async for model in client.models.list()] == ["default"]


async def test_openais_client_gets_the_text_before_a_stop_string_and_all_tokens(
    replica: Deployed, client: openai.AsyncOpenAI
) -> None:
    await replica.commit(2)
    arguments: dict[str, Any] = {"model": "default", "prompt": "12", "max_tokens": 24, "n": 4, "seed": 1}
    free = (await client.completions.create(**arguments, temperature=2)).choices
    stop = next(choice.text[3:5] for choice in free if len(choice.text) > 8)
    stopped = (await client.completions.create(**arguments, temperature=2, stop=stop)).choices
    for whole, part in zip(free, stopped, strict=True):
        assert part.text == whole.text.partition(stop)[0]
        assert whole.model_extra is not None
        assert part.model_extra is not None
        tokens = part.model_extra["token_ids"]
        assert tokens == whole.model_extra["token_ids"][: len(tokens)]
        assert part.finish_reason == "stop" or stop not in whole.text
    assert any(stop in choice.text for choice in free)


async def test_openais_client_may_ask_for_the_k_most_likely_tokens(
    replica: Deployed, client: openai.AsyncOpenAI
) -> None:
    await replica.commit(2)
    arguments: dict[str, Any] = {"model": "default", "prompt": "12", "max_tokens": 6, "temperature": 2}
    likeliest = await client.completions.create(**{**arguments, "temperature": 0})
    one = await client.completions.create(**arguments, extra_body={"top_k": 1})
    assert one.choices[0].text == likeliest.choices[0].text


@pytest.mark.guide("F3", "G10")
async def test_openais_client_chats(replica: Deployed, client: openai.AsyncOpenAI) -> None:
    await replica.commit(2)
    answer = await client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "12"}], max_completion_tokens=3, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3
    assert answer.choices[0].model_extra is not None
    assert len(answer.choices[0].model_extra["token_ids"]) == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "model: 'other'"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"stream": True}, openai.BadRequestError, "stream"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
    ],
)
async def test_what_is_not_offered_is_an_openai_error(
    replica: Deployed, client: openai.AsyncOpenAI, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    await replica.commit(0)
    with pytest.raises(error, match=message):
        await client.completions.create(**{"model": "default", "prompt": "1", "max_tokens": 2, **fields})


async def test_http_is_unavailable_before_weights_and_healthy_after(
    replica: Deployed, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.InternalServerError) as refusal:
        await client.completions.create(model="default", prompt="1")
    assert refusal.value.status_code == 503
    async with aiohttp.ClientSession() as session:
        assert (await session.get(f"{replica.url}/health")).status == 503
        await replica.commit(5)
        answer = await session.get(f"{replica.url}/health")
        assert (answer.status, await answer.json()) == (200, {"policy_version": 5})


async def test_a_call_that_is_called_off_frees_its_place(replica: Deployed) -> None:
    await replica.commit(0)
    calls = [asyncio.create_task(replica.generate(max_new_tokens=20, request_id=str(i))) for i in range(8)]
    await asyncio.sleep(0)
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)
    await replica.generate()
    state = await call(replica.stub.GetReplicaState, pb.GetReplicaStateRequest(), timeout_seconds=LIMIT_SECONDS)
    assert state.queued == 0
