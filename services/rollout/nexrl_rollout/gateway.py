"""The recording gateway: an OpenAI-compatible API for each rollout, which records the tokens of all completions.

An agent that uses OpenAI's API needs no change to be trained: it gets a base URL with the session in its path, and
never handles tokens.
"""

import re
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web

from nexrl.environment import Endpoint
from nexrl.errors import InvalidArgumentError, NexrlError, NotFoundError
from nexrl.policy import Policy, Sampling
from nexrl.rpc.status import http_status
from nexrl.text import TextCodec
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl_rollout import metrics
from nexrl_rollout.chat import (
    add_logprobs,
    add_token_ids,
    chat_completion,
    context_overflow,
    error_body,
    reply_message,
    stream_events,
)
from nexrl_rollout.chat_request import ChatRequest, parse_chat_request, refused
from nexrl_rollout.session import Session, SessionPrompt

MAX_BODY_BYTES = 16 * 2**20
TOO_LARGE = (
    f"the request is larger than {MAX_BODY_BYTES // 2**20} MiB. Send shorter messages; if they echo token ids of "
    "earlier turns, leave those out, or do not ask for them (return_token_ids, return_tokens_as_token_ids)"
)


CLOSED = "it was closed"
LOST = "its time limit has passed, or its lease was lost"
MAX_ENDED = 10_000
"""Ended sessions of which the reason is remembered."""


class ContextOverflowError(InvalidArgumentError):
    """Raised for a prompt that leaves no room for a completion."""


class Gateway:
    """Serves the open sessions. The sampling parameters are the session's; a client may only add limits to a turn."""

    def __init__(
        self, policy: Policy, codec: TextCodec, *, model: str, max_context_tokens: int, timeout_seconds: float
    ) -> None:
        self._policy = policy
        self._codec = codec
        self._model = model
        self._max_context_tokens = max_context_tokens
        self._timeout_seconds = timeout_seconds
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, str] = {}
        self._runner: web.AppRunner | None = None
        self.address = ""
        """What base URLs begin with, http://host:port or https://host:port; set by `listen`."""

    async def listen(
        self,
        host: str,
        port: int,
        *,
        advertised: str = "",
        tls: ssl.SSLContext | None = None,
        sessions: web.Application | None = None,
    ) -> None:
        """Serve at host:port; port 0 selects a free port.

        `advertised` is the host in the base URLs, by default `host`. `sessions` is served below /sessions; its errors
        get the same form.
        """
        app = web.Application(middlewares=[_openai_errors], client_max_size=MAX_BODY_BYTES)
        for prefix in ("/s/{session}", ""):  # without a prefix, a header or the API key names the session
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat_completions)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/tokenize", self._tokenize)
        if sessions is not None:
            app.add_subapp("/sessions", sessions)
        # Cancel the handler if the client disconnects: the session must not record a turn that the client never saw.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        scheme = "https" if tls else "http"
        self.address = f"{scheme}://{advertised or host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def session(self, sampling: Sampling, seeds: Iterator[int]) -> Iterator[Session]:
        """Open a session for one rollout; after the block its requests are refused. `seeds` has one for each turn."""
        session = Session(sampling, seeds)
        self._sessions[session.id] = session
        reason = LOST
        try:
            yield session
            reason = CLOSED
        finally:
            del self._sessions[session.id]
            self._ended[session.id] = reason
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def why_ended(self, session_id: str) -> str:
        """Returns why a session is not open."""
        return self._ended.get(session_id, "no such session, or it ended long ago, or with an earlier process")

    def endpoint(self, session: Session) -> Endpoint:
        """Returns the endpoint of the session, for an environment."""
        base_url = f"{self.address}/s/{session.id}/v1"
        sampling = session.sampling
        return Endpoint(base_url, session.id, self._model, sampling.max_new_tokens, sampling.temperature)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        chat = parse_chat_request(await read_json(request), session.sampling)
        response = await self._serve(session, chat)
        return await _streamed(request, response) if chat.stream else web.json_response(response)

    async def _serve(self, session: Session, chat: ChatRequest) -> dict[str, Any]:
        self._check_tools(chat)
        prompt = session.prompt(self._codec, chat.messages, chat.tools)
        room = self._max_context_tokens - len(prompt.token_ids)
        if room < 1:
            raise ContextOverflowError(context_overflow(len(prompt.token_ids), self._max_context_tokens))
        limit = min(session.sampling.max_new_tokens, room, chat.max_tokens or room)
        stop = session.sampling.stop + chat.stop
        completions = await self._policy.generate(
            prompt.token_ids,
            1,
            replace(session.sampling, max_new_tokens=limit, stop=stop),
            seeds=[next(session.seeds)],
            timeout_seconds=self._timeout_seconds,
        )
        text = self._codec.decode([completions[0].token_ids])[0]
        message = reply_message(text, stop, parse_tool_calls=chat.parse_tool_calls)
        session.record(
            prompt,
            completions[0],
            [*chat.messages, message],
            tools=chat.tools,
            text=text,
            prompt_text=self._prompt_text(prompt),
        )
        if prompt.is_break:
            metrics.CONTIGUITY_VIOLATIONS.inc()
        return self._response(chat, message, prompt, completions[0])

    def _response(
        self, chat: ChatRequest, message: Mapping[str, Any], prompt: SessionPrompt, completion: GeneratedCompletion
    ) -> dict[str, Any]:
        response = chat_completion(self._model, message, prompt.token_ids, completion)
        if chat.token_ids:
            add_token_ids(response, prompt.token_ids, completion)
        if chat.logprobs and chat.ids_as_tokens:
            add_logprobs(response, [f"token_id:{token}" for token in completion.token_ids], completion)
        elif chat.logprobs:
            add_logprobs(response, self._codec.decode([[token] for token in completion.token_ids]), completion)
        return response

    def _check_tools(self, chat: ChatRequest) -> None:
        if chat.tools and not self._codec.renders_tools:
            raise refused("tools", "the model's chat template has no place for tools; describe them in a message")

    def _prompt_text(self, prompt: SessionPrompt) -> str:
        return "" if prompt.continues else self._codec.decode([prompt.token_ids])[0]

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "owned_by": "nexrl", "max_model_len": self._max_context_tokens}
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Answers with the prompt ids of a chat request with these messages, or with the ids of a text."""
        session = self._session(request)
        body = await read_json(request)
        if isinstance(body, dict) and isinstance(body.get("prompt"), str):
            token_ids = list(self._codec.encode(body["prompt"]))
        else:
            chat = parse_chat_request(body, session.sampling)
            self._check_tools(chat)
            token_ids = list(session.prompt(self._codec, chat.messages, chat.tools).token_ids)
        return web.json_response(
            {"tokens": token_ids, "count": len(token_ids), "max_model_len": self._max_context_tokens}
        )

    def _session(self, request: web.Request) -> Session:
        name = _session_name(request)
        if (session := self._sessions.get(name)) is None:
            raise NotFoundError(f"the session is not open: {self.why_ended(name)}")
        return session


def _session_name(request: web.Request) -> str:
    """Returns what names the session: the path, the header X-Session-ID, or the API key."""
    key = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return request.match_info.get("session") or request.headers.get("X-Session-ID") or key


async def read_json(request: web.Request) -> object:
    """Returns the body. Raises InvalidArgumentError if it is not JSON."""
    try:
        body: object = await request.json()
    except ValueError as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from error
    return body


async def _streamed(request: web.Request, response: dict[str, Any]) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for event in stream_events(response):
        await stream.write(event)
    await stream.write_eof()
    return stream


@web.middleware
async def _openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ContextOverflowError as error:
        return web.json_response(error_body(error.message, "context_length_exceeded", "messages"), status=400)
    except NexrlError as error:
        field = error.violations[0].field if error.violations else None
        return web.json_response(error_body(error.message, error.status.lower(), field), status=http_status(error))
    except web.HTTPRequestEntityTooLarge as error:
        return web.json_response(error_body(TOO_LARGE, "request_too_large"), status=error.status)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        message = f"{request.method} {_path(request)} is not served here. Served: {', '.join(_served(request.app))}"
        return web.json_response(error_body(message, "not_found"), status=error.status)


def _path(request: web.Request) -> str:
    """Returns the path without the session, whose id is a secret."""
    return re.sub(r"^/s/[^/]*", "/s/{session}", request.path)


def _served(app: web.Application) -> list[str]:
    return [
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]
