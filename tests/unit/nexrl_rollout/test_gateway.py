"""The gateway over HTTP: the `openai` package against it, and what it refuses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import aiohttp
import openai
import pytest

from nexrl.errors import InvalidArgumentError, NexrlError, UnavailableError
from nexrl.policy import Sampling
from nexrl.text import TextCodec
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from nexrl_rollout.gateway import Gateway
from nexrl_rollout.session import Session
from tests.support.rollout import FakeEngine, completion, policy_over
from tests.support.tokenizers import chat_tokenizer

CODEC = TextCodec(chat_tokenizer())
END = CODEC.encode("<|im_end|>")[0]
GO: list[Any] = [{"role": "user", "content": "go"}]
SAMPLING = Sampling(max_new_tokens=16, temperature=0.5, top_p=0.9, top_k=7)


def spelled(text: str) -> FakeEngine:
    """An engine that writes `text` one character per token, as no tokenizer would, and ends its turn."""

    def reply(request: GenerateRequest, index: int) -> GeneratedCompletion:
        tokens = [*(CODEC.encode(character)[0] for character in text), END][: request.max_new_tokens]
        return completion(
            tokens, "stop" if tokens[-1] == END else "length", [len(request.prompt_token_ids)] * len(tokens)
        )

    return FakeEngine(reply)


@asynccontextmanager
async def gateway_over(
    engine: FakeEngine, max_context_tokens: int = 512, timeout_seconds: float = 30
) -> AsyncIterator[Gateway]:
    async with policy_over(engine, max_retries=0) as policy:
        gateway = Gateway(
            policy, CODEC, model="default", max_context_tokens=max_context_tokens, timeout_seconds=timeout_seconds
        )
        await gateway.listen("127.0.0.1", 0)
        try:
            yield gateway
        finally:
            await gateway.close()


@asynccontextmanager
async def chat(
    engine: FakeEngine,
    max_context_tokens: int = 512,
    sampling: Sampling = SAMPLING,
    timeout_seconds: float = 30,
) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """A session, and a client of it."""
    async with gateway_over(engine, max_context_tokens, timeout_seconds) as gateway:
        with gateway.session(sampling, count()) as session:
            endpoint = gateway.endpoint(session)
            async with openai.AsyncOpenAI(
                base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
            ) as client:
                yield session, client


@pytest.mark.guide("F3", "G10", "G18")
async def test_three_turns_of_an_openai_client_are_one_contiguous_trajectory() -> None:
    engine = spelled("ab12")
    async with chat(engine) as (session, client):
        messages: list[Any] = GO
        for turn in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages)
            assert answer.choices[0].message.content == "ab12"
            assert answer.choices[0].finish_reason == "stop"
            messages = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": f"turn {turn}"}]
        (trajectory,) = session.trajectories(1.0, {}, {"task_id": "t"})

    seen: list[int] = []
    for request, served in zip(engine.requests, engine.served, strict=True):
        assert list(request.prompt_token_ids[: len(seen)]) == seen
        seen = [*request.prompt_token_ids, *served.token_ids]
    assert list(trajectory.token_ids) == seen
    recorded = [
        (token, logprob)
        for token, logprob, mask in zip(trajectory.token_ids, trajectory.logprobs, trajectory.loss_mask, strict=True)
        if mask
    ]
    assert recorded == [
        pair for served in engine.served for pair in zip(served.token_ids, served.logprobs, strict=True)
    ]
    assert [span.policy_version for span in trajectory.spans] == [len(r.prompt_token_ids) for r in engine.requests]
    assert trajectory.response == "ab12\nab12\nab12"
    assert [list(request.seeds) for request in engine.requests] == [[0], [1], [2]]
    contexts = [trajectory.token_ids[: completion.start] for completion in trajectory.completions]
    assert contexts == [request.prompt_token_ids for request in engine.requests]


async def test_a_reply_ends_before_the_stop_strings_of_the_experiment_and_of_the_client() -> None:
    engine = FakeEngine(lambda request, index: completion(CODEC.encode("ab12"), "stop"))
    async with chat(engine, sampling=replace(SAMPLING, stop=("2", "z"))) as (session, client):
        first = await client.chat.completions.create(model="any", messages=GO, stop="b1")
        messages = [*GO, first.choices[0].message.model_dump(), {"role": "user", "content": "on"}]
        second = await client.chat.completions.create(model="any", messages=messages, stop=None)
        (trajectory,) = session.trajectories(1.0, {}, {})
    assert [answer.choices[0].message.content for answer in (first, second)] == ["a", "ab1"]
    assert [list(request.stop) for request in engine.requests] == [["2", "z", "b1"], ["2", "z"]]
    served = [*engine.requests[0].prompt_token_ids, *CODEC.encode("ab12")]
    assert list(engine.requests[1].prompt_token_ids[: len(served)]) == served
    assert engine.requests[1].prompt_token_ids[len(served)] == END  # the turn's end, which the policy did not write
    assert trajectory.token_ids[-len(CODEC.encode("ab12")) :] == CODEC.encode("ab12")


async def test_a_stop_string_that_ends_a_tool_call_is_part_of_it() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    engine = FakeEngine(lambda request, index: completion(CODEC.encode(call), "stop"))
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    async with chat(engine) as (_, client):
        answer = await client.chat.completions.create(model="any", messages=GO, tools=tools, stop="</tool_call>")
    calls = answer.choices[0].message.model_dump()["tool_calls"]
    assert [found["function"]["name"] for found in calls] == ["add"]


@pytest.mark.parametrize("asked_by", ["return_token_ids", "return_tokens_as_token_ids"])
async def test_assistant_message_carries_its_tokens_if_they_are_asked_for(asked_by: str) -> None:
    engine = spelled("ab")
    async with chat(engine) as (_, client):
        plain = await client.chat.completions.create(model="any", messages=GO)
        assert not {"prompt_token_ids", "generation_token_ids"} & plain.choices[0].message.model_dump().keys()
        answer = await client.chat.completions.create(model="any", messages=GO, extra_body={asked_by: True})
    engine.requests, engine.served = engine.requests[1:], engine.served[1:]
    message = answer.choices[0].message.model_dump()
    assert message["prompt_token_ids"] == list(engine.requests[0].prompt_token_ids)
    assert message["generation_token_ids"] == list(engine.served[0].token_ids)
    assert message["generation_log_probs"] == list(engine.served[0].logprobs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_streamed_reply_is_the_same_reply() -> None:
    async with chat(spelled("ab")) as (session, client):
        stream = await client.chat.completions.create(model="any", messages=GO, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert len(session.trajectories(0.0, {}, {})) == 1
    assert "".join(choice.delta.content or "" for choice in chunks) == "ab"
    assert chunks[-1].finish_reason == "stop"


async def test_sampling_is_the_sessions_and_a_client_may_only_repeat_it() -> None:
    engine = spelled("abab")
    async with chat(engine) as (_, client):
        for limit in (2, 1000):
            await client.chat.completions.create(
                model="any", messages=GO, max_tokens=limit, temperature=0.5, top_p=0.9, extra_body={"top_k": 7}
            )
    for turn, request in enumerate(engine.requests):
        assert list(request.seeds) == [turn]
        assert (request.temperature, request.top_p, request.top_k, request.n) == (0.5, 0.9, 7, 1)
    assert [request.max_new_tokens for request in engine.requests] == [2, 16]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", 1.0, "is 0.5 in this episode"),
        ("top_p", 1.0, "is 0.9 in this episode"),
        ("top_k", -1, "is 7 in this episode"),
        ("seed", 1, "inference.seed"),
        ("n", 2, "must be 1"),
        ("tool_choice", "required", "must be auto or none"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}, "must be auto or none"),
        ("response_format", {"type": "json_object"}, "must be {'type': 'text'}"),
        ("logprobs", 1, "must be true or false"),
        ("top_logprobs", 5, "must be 0"),
        ("frequency_penalty", 0.1, "must be 0"),
        ("presence_penalty", 0.1, "must be 0"),
        ("logit_bias", {"5": 1}, "must be {}"),
        ("parallel_tool_calls", False, "must be True"),
        ("stop", ["1", "2", "3", "4", "5"], "at most 4 texts"),
        ("stream", "yes", "must be true or false"),
        ("max_completion_tokens", 0, "at least 1"),
        ("tools", [{"name": "add"}], "must be a list of"),
        ("guided_json", {}, "is not supported; omit it. Supported: messages, tools"),
    ],
)
async def test_a_parameter_that_cannot_be_honoured_is_refused_by_its_name(
    field: str, value: object, allowed: str
) -> None:
    engine = spelled("ab")
    async with chat(engine) as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="any", messages=GO, extra_body={field: value})
    assert caught.value.param == field
    assert allowed in caught.value.message
    assert not engine.requests


async def test_parameters_that_say_what_the_gateway_does_are_accepted() -> None:
    async with chat(spelled("ab")) as (_, client):
        answer = await client.chat.completions.create(
            model="any",
            messages=GO,
            n=1,
            tool_choice="auto",
            response_format={"type": "text"},
            frequency_penalty=0.0,
            logit_bias={},
            seed=None,
            user="me",
            extra_body={"repetition_penalty": 1.0},
        )
    assert answer.choices[0].message.content == "ab"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_are_those_that_were_recorded(stream: bool) -> None:
    engine = spelled("ab")
    async with chat(engine) as (_, client):
        asked: dict[str, Any] = {"model": "any", "messages": GO, "logprobs": True, "top_logprobs": 0}
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
            choice = chunks[0].choices[0]
        else:
            choice = (await client.chat.completions.create(**asked)).choices[0]
        as_ids = await client.chat.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True})
    content = choice.logprobs.content
    assert [each.token for each in content] == ["a", "b", ""]
    assert [each.logprob for each in content] == list(engine.served[0].logprobs)
    assert as_ids.choices[0].logprobs.content[-1].token == f"token_id:{END}"


async def test_tool_choice_none_leaves_a_tool_call_as_text() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    async with chat(spelled(call), sampling=Sampling(200)) as (_, client):
        answer = await client.chat.completions.create(model="any", messages=GO, tools=tools, tool_choice="none")
    assert answer.choices[0].message.content == call
    assert answer.choices[0].finish_reason == "stop"


async def test_tools_that_the_chat_template_would_drop_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("if tools", "if false")
    monkeypatch.setattr("tests.unit.nexrl_rollout.test_gateway.CODEC", TextCodec(tokenizer))
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    async with chat(spelled("ab")) as (_, client):
        with pytest.raises(openai.BadRequestError, match="chat template has no place for tools") as caught:
            await client.chat.completions.create(model="any", messages=GO, tools=tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/responses", 404), ("GET", "/chat/completions", 405)], ids=["404", "405"]
)
async def test_a_route_that_is_not_served_names_those_that_are(method: str, path: str, status: int) -> None:
    async with gateway_over(spelled("ab")) as gateway:
        with gateway.session(SAMPLING, count()) as session:
            url = gateway.endpoint(session).base_url + path
            async with aiohttp.ClientSession() as http, http.request(method, url) as response:
                assert response.status == status
                message = (await response.json())["error"]["message"]
    assert path in message
    assert session.id not in message
    assert "POST /s/{session}/v1/chat/completions, GET /s/{session}/v1/models" in message


async def test_a_request_that_is_too_large_is_refused_with_the_limit_and_the_remedy() -> None:
    async with chat(spelled("ab")) as (_, client):
        with pytest.raises(openai.APIStatusError, match=r"larger than 16 MiB.*return_token_ids") as caught:
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 2**24}])
    assert caught.value.status_code == 413


async def test_full_context_is_refused_in_the_words_that_agents_look_for() -> None:
    async with chat(spelled("ab"), max_context_tokens=40) as (_, client):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 40 tokens") as caught:
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "long " * 20}])
    assert caught.value.code == "context_length_exceeded"


async def test_completion_is_limited_to_the_room_that_is_left() -> None:
    engine = spelled("abababababababab")
    prompt = len(CODEC.encode(CODEC.render([{"role": "user", "content": "go"}])))
    async with chat(engine, max_context_tokens=prompt + 3) as (_, client):
        answer = await client.chat.completions.create(model="any", messages=GO)
    assert engine.requests[0].max_new_tokens == 3
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("session_id", ["unknown", "ended"])
async def test_session_that_is_not_open_is_refused(session_id: str) -> None:
    async with gateway_over(spelled("ab")) as gateway:
        with gateway.session(SAMPLING, count()) as session:
            ended = session.id
        url = f"{gateway.address}/s/{ended if session_id == 'ended' else 'guess'}/v1/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json={"messages": []}) as response:
            assert response.status == 404
            said = (await response.json())["error"]["message"]
            assert ("it was closed" if session_id == "ended" else "no such session") in said


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'{"messages": []}', "messages: must be a list of 1"),
        (b'{"messages": [{"content": "x"}]}', "messages[0]: must be an object with a role"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n: must be 1"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}', "stop: must be a text or a list"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": 3}', "stop: must be a text or a list"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": ["1", "2", "3", "4", "5"]}', "at most 4 texts"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0.5}', "max_tokens"),
    ],
)
async def test_wrong_request_is_refused_with_what_is_wrong(body: bytes, message: str) -> None:
    engine = spelled("ab")
    async with gateway_over(engine) as gateway:
        with gateway.session(SAMPLING, count()) as session:
            url = f"{gateway.endpoint(session).base_url}/chat/completions"
            async with aiohttp.ClientSession() as http, http.post(url, data=body) as response:
                assert response.status == 400
                error = (await response.json())["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize(
    ("error", "status"), [(NexrlError("broken"), 500), (InvalidArgumentError("refused"), 400)], ids=["500", "400"]
)
async def test_engine_error_is_an_openai_error(error: NexrlError, status: int) -> None:
    engine = spelled("ab")
    engine.errors = [error]
    async with chat(engine) as (session, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="any", messages=GO)
        assert caught.value.status_code == status
        assert not session.trajectories(0.0, {}, {})


@pytest.mark.guide("F3", "G10", "G18")
async def test_tool_calls_are_parsed_and_their_results_extend_the_chain() -> None:
    written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engine = spelled(written)
    tools: list[Any] = [{"type": "function", "function": {"name": "add"}}]
    async with chat(engine, sampling=Sampling(max_new_tokens=200)) as (session, client):
        messages: list[Any] = GO
        answer = await client.chat.completions.create(model="any", messages=messages, tools=tools)
        (call,) = answer.choices[0].message.tool_calls or []
        messages += [
            answer.choices[0].message.model_dump(),
            {"role": "tool", "content": "1", "tool_call_id": call.id},
        ]
        await client.chat.completions.create(model="any", messages=messages, tools=tools)
        (trajectory,) = session.trajectories(1.0, {}, {})
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert answer.choices[0].finish_reason == "tool_calls"
    assert sum(trajectory.loss_mask) == 2 * (len(written) + 1)


async def test_tokenize_gives_the_ids_that_the_next_turn_is_generated_from() -> None:
    engine = spelled("ab")
    messages: list[Any] = GO
    async with chat(engine) as (_, client):
        for _ in range(2):
            tokens = await client.post("../tokenize", body={"messages": messages}, cast_to=dict[str, Any])
            answer = await client.chat.completions.create(model="any", messages=messages)
            assert tokens["tokens"] == list(engine.requests[-1].prompt_token_ids)
            messages = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]


async def test_models_tells_the_longest_context() -> None:
    async with chat(spelled("ab"), max_context_tokens=77) as (_, client):
        models = (await client.models.list()).data
    assert [(model.id, model.model_dump()["max_model_len"]) for model in models] == [("default", 77)]


async def test_policy_without_replicas_is_a_503() -> None:
    engine = spelled("ab")
    engine.errors = [UnavailableError("stopping")] * 1000
    async with chat(engine, timeout_seconds=0.2) as (_, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="any", messages=GO)
    assert caught.value.status_code in (503, 504)
