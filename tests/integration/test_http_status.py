"""Both OpenAI-compatible servers send the same HTTP status for the same typed error."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from nexrl.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NexrlError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from nexrl.policy import Sampling
from nexrl.text import TextCodec
from nexrl_inference.builtin.openai_api import OpenAIApi
from nexrl_rollout.gateway import Gateway
from tests.support.tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer()
BODY = {"model": "default", "messages": [{"role": "user", "content": "go"}]}


class Failing:
    """Stands in for the gateway's policy and for the replica: `generate` raises."""

    def __init__(self, error: NexrlError) -> None:
        self._error = error

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        raise self._error


@asynccontextmanager
async def gateway(failing: Any) -> AsyncIterator[str]:
    """The base URL of a rollout gateway."""
    served = Gateway(failing, TextCodec(TOKENIZER), model="default", max_context_tokens=512, timeout_seconds=5)
    await served.listen("127.0.0.1", 0)
    try:
        with served.session(Sampling(max_new_tokens=4), count()) as session:
            yield served.endpoint(session).base_url
    finally:
        await served.close()


@asynccontextmanager
async def replica(failing: Any) -> AsyncIterator[str]:
    """The base URL of a replica's OpenAI API."""
    runner = web.AppRunner(OpenAIApi(failing, cast(Any, TOKENIZER), "default").application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}/v1".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("server", [gateway, replica])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidArgumentError, 400),
        (NotFoundError, 404),
        (LeaseLostError, 409),
        (ResourceExhaustedError, 429),
        (NexrlError, 500),
        (FailedPreconditionError, 503),
        (UnavailableError, 503),
        (DeadlineExceededError, 504),
    ],
)
async def test_an_error_has_one_http_status(server: Callable[..., Any], error: type[NexrlError], status: int) -> None:
    async with server(Failing(error("wrong"))) as url, aiohttp.ClientSession() as session:
        response = await session.post(f"{url}/chat/completions", json=BODY)
        assert response.status == status
        assert (await response.json())["error"]["message"] == "wrong"
