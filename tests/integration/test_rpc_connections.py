"""How many connections a server accepts, and for how long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nexrl.rpc import server
from tests.support.services import running_service
from tests.support.validator import ValidatorServicer, serving, start_validation

CLOSED = b""


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
    try:
        while await asyncio.wait_for(reader.read(1000), 20) != CLOSED:
            pass
    except ConnectionError:
        pass


async def test_a_connection_beyond_the_limit_is_closed_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SERVER_OPTIONS", changed("grpc.max_allowed_incoming_connections", 2))
    async with running_service(tmp_path, serving(ValidatorServicer())) as process:
        async with connected(process.address), connected(process.address), connected(process.address) as third:
            await until_closed(third)
        assert (await start_validation(process.address)).samples == 7


def changed(option: str, value: int) -> list[tuple[str, int]]:
    """Return the server's options, one of them changed."""
    assert option in dict(server.SERVER_OPTIONS)
    return [(name, value if name == option else old) for name, old in server.SERVER_OPTIONS]
