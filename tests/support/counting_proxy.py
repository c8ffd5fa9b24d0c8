"""A TCP proxy that counts the bytes that clients send. It shows how much of a message a server takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SILENCE_SECONDS = 3.0


class CountingProxy:
    """Forwards connections to a server."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.sent_bytes = 0
        """Bytes that clients have sent to the server, on all connections."""

    async def until_silent(self) -> None:
        """Wait until clients send nothing for a while: then flow control stops them."""
        before = -1
        while self.sent_bytes != before:
            before = self.sent_bytes
            await asyncio.sleep(SILENCE_SECONDS)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        for pump in (self._pump(reader, server_writer, counts=True), self._pump(server_reader, writer, counts=False)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        try:
            while content := await reader.read(2**16):
                self.sent_bytes += len(content) if counts else 0
                writer.write(content)
                await writer.drain()
        except ConnectionError:
            pass  # one side has closed the connection, so the other is closed too
        finally:
            writer.close()


@asynccontextmanager
async def counting_proxy(target: str) -> AsyncIterator[CountingProxy]:
    """Run a proxy to `target`, host:port."""
    proxy = CountingProxy(target)
    server = await asyncio.start_server(proxy.forward, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
