"""The OpenAI-compatible HTTP API of a replica, for people and tools; rollouts use the gateway and gRPC.

`/v1/models`, `/v1/completions` (prompt as text or token ids), `/v1/chat/completions`, `/health`. Answers carry
`policy_versions`, one per generated token, beside OpenAI's fields. No streaming, no tools.
"""

import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from nexrl.errors import InvalidArgumentError, NexrlError, NotFoundError
from nexrl.rpc.http import error_response
from nexrl.stop_strings import text_before_stop
from nexrl_inference.replica import Replica
from nexrl_inference.requests import Completion, GenerationRequest

BodyT = TypeVar("BodyT", bound=BaseModel)


def _listed(stop: object) -> object:
    """OpenAI's `stop`: a text, a list of texts, or null."""
    return (stop,) if isinstance(stop, str) else stop or ()


class _Sampling(BaseModel):
    """The fields that both kinds of request share. Other fields of OpenAI's API are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str
    max_tokens: Annotated[int, Field(ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))] = 16
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    seed: Annotated[int, Field(ge=0)] | None = None
    stream: bool = False
    top_k: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    # A field that would change the answer, and is not supported, is refused.
    tools: None = None
    logit_bias: None = None
    response_format: None = None


class _CompletionRequest(_Sampling):
    prompt: str | list[int]


class _Message(BaseModel):
    role: str
    content: str


class _ChatRequest(_Sampling):
    messages: Annotated[list[_Message], Field(min_length=1)]


class OpenAIApi:
    """Routes of one replica."""

    def __init__(self, replica: Replica, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self._replica = replica
        self._tokenizer = tokenizer
        self._model = model

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        application = web.Application(middlewares=[_errors])
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        return application

    async def _health(self, request: web.Request) -> web.Response:
        state = self._replica.state()
        return web.json_response({"policy_version": state.policy_version}, status=200 if state.ready else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = _parse(_CompletionRequest, await request.read())
        prompt = self._tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        completions = await self._generate(body, prompt)
        choices = [{**_choice(i, c), "text": self._text(c, body.stop)} for i, c in enumerate(completions)]
        return web.json_response(self._answer("text_completion", prompt, completions, choices))

    async def _chat(self, request: web.Request) -> web.Response:
        body = _parse(_ChatRequest, await request.read())
        if not self._tokenizer.chat_template:
            raise InvalidArgumentError("messages: this model has no chat template; use /v1/completions")
        messages = [message.model_dump() for message in body.messages]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = self._tokenizer.encode(str(text), add_special_tokens=False)
        completions = await self._generate(body, prompt)
        choices = [
            {**_choice(i, c), "message": {"role": "assistant", "content": self._text(c, body.stop)}}
            for i, c in enumerate(completions)
        ]
        return web.json_response(self._answer("chat.completion", prompt, completions, choices))

    async def _generate(self, body: _Sampling, prompt: list[int]) -> tuple[Completion, ...]:
        if body.model != self._model:
            raise NotFoundError(f"model: {body.model!r}; this server has {self._model!r}")
        if body.stream:
            raise InvalidArgumentError("stream: not supported here; the rollout gateway streams")
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_ids=tuple(prompt),
            max_new_tokens=body.max_tokens,
            n=body.n,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop,
            seeds=_seeds(body.seed, body.n),
        )
        return (await self._replica.generate(request)).completions

    def _text(self, completion: Completion, stop: Sequence[str]) -> str:
        """Return the text before a stop string; `token_ids` of the answer have all tokens."""
        text = str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))
        return text_before_stop(text, stop)

    def _answer(
        self, kind: str, prompt: list[int], completions: tuple[Completion, ...], choices: list[dict[str, Any]]
    ) -> dict[str, Any]:
        generated = sum(len(completion.token_ids) for completion in completions)
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": generated,
                "total_tokens": len(prompt) + generated,
            },
        }


def _seeds(seed: int | None, n: int) -> tuple[int, ...]:
    """Return a seed for each of n samples, derived from OpenAI's one seed."""
    if seed is None:
        return ()
    seeds = random.Random(seed)
    return tuple(seeds.getrandbits(63) for _ in range(n))


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": {"token_logprobs": completion.logprobs},
        "policy_versions": completion.policy_versions,
    }


def _parse(model: type[BodyT], body: bytes) -> BodyT:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
        raise InvalidArgumentError(problems) from None


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except NexrlError as error:
        return error_response(error)
