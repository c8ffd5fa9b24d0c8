"""A TLS client channel that reloads its certificate. gRPC's own channel never does
(https://github.com/grpc/grpc/issues/41779)."""

import asyncio
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import grpc

from nexrl.tls import CredentialFiles, Credentials, Tls

Options = list[tuple[str, int | str]]


class RenewedChannel(grpc.aio.Channel):
    """Opens a new channel when the files change. A call ends on the channel that it began on."""

    def __init__(self, address: str, tls: Tls, options: Options) -> None:
        self._address = address
        self._files = CredentialFiles(tls)
        # The peer must have the experiment's name in its certificate, whatever its address is.
        self._options = [*options, ("grpc.ssl_target_name_override", tls.name)]
        self._newest = self._open(self._files.newest())
        self._retired: set[_Generation] = set()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._call, "unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._call, "unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._call, "stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._call, "stream_stream", arguments, options)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        for generation in (*self._retired, self._newest):
            await generation.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._current().channel.channel_ready()

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _call(self, kind: str, arguments: Any, options: Any, *request: Any, **call_options: Any) -> Any:
        generation = self._current()
        if token := self._files.tls.token:
            bearer = ("authorization", f"Bearer {token.read_text().strip()}")
            call_options["metadata"] = (*(call_options.get("metadata") or ()), bearer)
        call = getattr(generation.channel, kind)(*arguments, **options)(*request, **call_options)
        generation.in_flight += 1
        call.add_done_callback(lambda _: self._on_done(generation))
        return call

    def _current(self) -> "_Generation":
        if (credentials := self._files.newest()) is not self._newest.credentials:
            retired, self._newest = self._newest, self._open(credentials)
            self._retired.add(retired)
            self._close_when_idle(retired)
        return self._newest

    def _on_done(self, generation: "_Generation") -> None:
        generation.in_flight -= 1
        if generation in self._retired:
            self._close_when_idle(generation)

    def _close_when_idle(self, retired: "_Generation") -> None:
        if retired.in_flight == 0:
            closing = asyncio.get_running_loop().create_task(retired.channel.close())
            closing.add_done_callback(lambda _: self._retired.discard(retired))

    def _open(self, credentials: Credentials) -> "_Generation":
        shown = grpc.ssl_channel_credentials(credentials.ca, credentials.key or None, credentials.certificate or None)
        return _Generation(credentials, grpc.aio.secure_channel(self._address, shown, options=self._options))


@dataclass(eq=False)
class _Generation:
    """One channel, with the certificate that it was opened with."""

    credentials: Credentials
    channel: grpc.aio.Channel
    in_flight: int = 0
