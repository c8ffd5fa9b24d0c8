"""Which bytes of a request a server reads: no message above its limit, and large requests in pieces, one at a time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.rpc import client, interceptor, limits
from nexrl.rpc.client import call_in_pieces, connect
from nexrl.v1 import validator_service_pb2 as pb
from tests.support.counting_proxy import counting_proxy
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.services import running_service
from tests.support.validator import SERVICE, ValidatorServicer, serving

METHOD = f"/{SERVICE}/StartValidation"
PIECE_BYTES = 10
LIMIT_BYTES = 1000
LATER_REQUESTS = 50
"""Time enough for the server to handle an earlier request that does not wait."""


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of METHOD may have LIMIT_BYTES, and a message PIECE_BYTES."""
    monkeypatch.setattr(limits, "LARGER_BYTES", {METHOD: LIMIT_BYTES})
    for module in (client, interceptor):
        monkeypatch.setattr(module, "MAX_PIECE_BYTES", PIECE_BYTES)


def request(size: int) -> pb.StartValidationRequest:
    """Return a request of this many bytes."""
    return pb.StartValidationRequest(request_id="x" * (size - (2 if size < 130 else 3)))


async def start(channel: grpc.aio.Channel, size: int) -> int:
    answer = await call_in_pieces(
        channel, METHOD, request(size), pb.StartValidationResponse.FromString, timeout_seconds=LIMIT_SECONDS
    )
    samples: int = answer.samples
    return samples


@pytest.mark.parametrize("takes_pieces", [False, True])
async def test_a_message_above_the_limit_of_the_server_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_pieces: bool
) -> None:
    if takes_pieces:
        monkeypatch.setattr(limits, "LARGER_BYTES", {METHOD: limits.MAX_MESSAGE_BYTES})
    size = limits.MAX_PIECE_BYTES + 1
    async with (
        running_service(tmp_path, serving(ValidatorServicer())) as process,
        counting_proxy(process.address) as proxy,
        connect(proxy.address) as channel,
    ):
        put: Any = channel.unary_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError, match=f"larger than max \\({size} vs. {size - 1}\\)") as refusal:
            await put(bytes(size), timeout=LIMIT_SECONDS)
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert proxy.sent_bytes < size / 10


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES + 1, LIMIT_BYTES])
@pytest.mark.usefixtures("in_pieces")
async def test_a_request_in_pieces_arrives_whole(tmp_path: Path, size: int) -> None:
    async with (
        running_service(tmp_path, serving(servicer := ValidatorServicer())) as process,
        connect(process.address) as channel,
    ):
        assert await start(channel, size) == 7
    assert servicer.request_ids == [request(size).request_id]


@pytest.mark.usefixtures("in_pieces")
async def test_a_request_in_pieces_is_refused_at_the_piece_that_is_over_the_limit(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(PIECE_BYTES)

    async with (
        running_service(tmp_path, serving(servicer := ValidatorServicer())) as process,
        connect(process.address) as channel,
    ):
        with pytest.raises(InvalidArgumentError, match=f"request: {LIMIT_BYTES + 1} bytes; .* at most {LIMIT_BYTES};"):
            await start(channel, LIMIT_BYTES + 1)
        put: Any = channel.stream_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError, match=f"request: {LIMIT_BYTES + PIECE_BYTES} bytes;"):
            await put(endless(), timeout=LIMIT_SECONDS)
    assert servicer.request_ids == []


@pytest.mark.usefixtures("in_pieces")
async def test_requests_in_pieces_are_received_one_at_a_time(tmp_path: Path) -> None:
    entered, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        if len(request.request_id) > PIECE_BYTES:
            entered.set()
            await may_end.wait()
        return pb.StartValidationResponse(samples=7)

    async with (
        running_service(tmp_path, serving(servicer := ValidatorServicer(wait))) as process,
        connect(process.address) as channel,
    ):
        first = asyncio.create_task(start(channel, 3 * PIECE_BYTES))
        await finished(entered.wait(), "the call has arrived")
        second = asyncio.create_task(start(channel, 4 * PIECE_BYTES))
        for _ in range(LATER_REQUESTS):  # the server has the second request before them, on the same connection
            assert await start(channel, PIECE_BYTES - 1) == 7
        large = [name for name in servicer.request_ids if len(name) > PIECE_BYTES]
        assert large == [request(3 * PIECE_BYTES).request_id]
        may_end.set()
        assert [await first, await second] == [7, 7]
