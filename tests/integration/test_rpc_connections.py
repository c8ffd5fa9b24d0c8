"""How many connections a server accepts, and for how long."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from nexrl.rpc import metrics, server
from nexrl.rpc.client import connect
from nexrl.v1 import validator_service_pb2 as pb
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.services import running_service
from tests.support.validator import SERVICE, ValidatorServicer, serving, start_validation

CLOSED = b""
START = f"/{SERVICE}/StartValidation"


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[asyncio.StreamReader]:
    """Open a TCP connection that sends nothing."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader
    finally:
        writer.close()


async def until_closed(reader: asyncio.StreamReader) -> None:
    """Wait until the server closes the connection."""
    with suppress(ConnectionError):
        while await finished(reader.read(1000), "the server closes a connection, or says something") != CLOSED:
            pass


async def test_a_connection_beyond_the_limit_is_closed_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time-out of the handshake would close all three connections. No wait of a test is as long as this one.
    monkeypatch.setattr(
        server, "SERVER_OPTIONS", changed("grpc.server_handshake_timeout_ms", 2000 * int(LIMIT_SECONDS))
    )
    monkeypatch.setattr(server, "SERVER_OPTIONS", changed("grpc.max_allowed_incoming_connections", 2))
    async with running_service(tmp_path, serving(ValidatorServicer())) as process:
        async with connected(process.address), connected(process.address), connected(process.address) as third:
            await until_closed(third)
        assert (await start_validation(process.address)).samples == 7


async def test_a_connection_without_a_call_is_closed_and_one_whose_call_waits_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SERVER_OPTIONS", changed("grpc.max_connection_idle_ms", 500))
    may_end = asyncio.Event()

    async def wait(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        await may_end.wait()
        return pb.StartValidationResponse(samples=7)

    async with (
        running_service(tmp_path, serving(ValidatorServicer(wait))) as process,
        connect(process.address) as waiting,
        grpc.aio.insecure_channel(process.address, options=[("grpc.use_local_subchannel_pool", 1)]) as idle,
    ):
        request = pb.StartValidationRequest(request_id="one")
        call: Any = waiting.unary_unary(START, pb.StartValidationRequest.SerializeToString)(
            request, timeout=LIMIT_SECONDS
        )
        await idle.channel_ready()
        await finished(idle.wait_for_state_change(grpc.ChannelConnectivity.READY), "the idle connection is closed")
        assert not call.done()
        assert waiting.get_state() == grpc.ChannelConnectivity.READY
        may_end.set()
        assert pb.StartValidationResponse.FromString(await call).samples == 7


async def test_silent_connections_to_the_metrics_are_bounded_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 8.0)
    async with running_service(tmp_path, serving(ValidatorServicer())) as process, AsyncExitStack() as stack:
        address = f"127.0.0.1:{process.metrics_port}"
        before = threading.active_count()
        silent = [await stack.enter_async_context(connected(address)) for _ in range(metrics.MAX_CONNECTIONS)]
        async with connected(address) as one_more:
            await until_closed(one_more)
        assert not any(reader.at_eof() for reader in silent)
        assert threading.active_count() <= before + metrics.MAX_CONNECTIONS
        for reader in silent:
            await until_closed(reader)
        async with aiohttp.ClientSession() as http, http.get(f"http://{address}/metrics") as response:
            assert "nexrl_build_info" in await response.text()


async def test_a_client_that_sends_a_byte_now_and_then_does_not_hold_a_connection_to_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 0.5)
    async with running_service(tmp_path, serving(ValidatorServicer())) as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", process.metrics_port)

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.1)

        trickling = asyncio.create_task(trickle())
        await until_closed(reader)
        trickling.cancel()
        await asyncio.wait([trickling])
        writer.close()


def changed(option: str, value: int) -> list[tuple[str, int]]:
    """Return the server's options, one of them changed."""
    assert option in dict(server.SERVER_OPTIONS)
    return [(name, value if name == option else old) for name, old in server.SERVER_OPTIONS]
