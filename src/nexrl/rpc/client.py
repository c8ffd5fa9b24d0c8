"""Opens channels and makes calls. Each call has a deadline and is retried until then while the peer is unreachable."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from nexrl.errors import NexrlError, UnavailableError
from nexrl.rpc.channel import RenewedChannel
from nexrl.rpc.limits import MAX_MESSAGE_BYTES, MAX_PIECE_BYTES
from nexrl.rpc.status import error_from_call
from nexrl.tls import Tls, tls_from_environment

CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.dns_min_time_between_resolutions_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # `call` retries, with the same request_id. Retries by gRPC would multiply those.
    ("grpc.enable_retries", 0),
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
]

FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0

ResponseT = TypeVar("ResponseT")


def connect(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Return a channel to `address`: host:port, or dns:///name:port for all pods of a headless Service.

    Uses `tls`, or else the TLS settings in the environment (NEXRL_TLS_*). Raises InvalidArgumentError if these are
    wrong.
    """
    tls = tls or tls_from_environment()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return RenewedChannel(address, tls, CLIENT_OPTIONS)


def shows_token() -> bool:
    """Return whether this process uses a token instead of a certificate. Then it must connect to token addresses."""
    tls = tls_from_environment()
    return tls is not None and tls.token is not None


def new_request_id() -> str:
    """Return a new request id. Use a new one for each call, and the same one in retries of that call."""
    return uuid.uuid4().hex


async def call(method: Callable[..., Awaitable[ResponseT]], request: object, *, timeout_seconds: float) -> ResponseT:
    """Call `method`. Retry for `timeout_seconds` while the peer is unreachable, or if it is full and asks for a retry.

    Raises the NexrlError that the server sent, or UnavailableError or DeadlineExceededError after `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    backoff_seconds = FIRST_BACKOFF_SECONDS
    while True:
        try:
            return await method(request, timeout=max(0.001, deadline - time.monotonic()))
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_call(rpc_error)
        pause_seconds = (error.retry_after_seconds or backoff_seconds) * random.uniform(0.5, 1.5)
        is_worth_it = isinstance(error, UnavailableError) or error.retry_after_seconds is not None
        if not is_worth_it or time.monotonic() + pause_seconds >= deadline:
            raise error
        await asyncio.sleep(pause_seconds)
        backoff_seconds = min(2 * backoff_seconds, MAX_BACKOFF_SECONDS)


async def call_in_pieces(
    channel: grpc.aio.Channel,
    method: str,
    request: Message,
    response: Callable[[bytes], ResponseT],
    *,
    timeout_seconds: float,
) -> ResponseT:
    """Call a unary method whose request may be larger than MAX_PIECE_BYTES, such as one with a train batch.

    The bytes of the request are sent as a stream of messages, which the server joins. `method` is the path of the
    method, and `response` parses its response. Retries and raises as `call` does.
    """
    content = request.SerializeToString()
    pieces = [content[at : at + MAX_PIECE_BYTES] for at in range(0, len(content), MAX_PIECE_BYTES)]
    send: Any = channel.stream_unary(method, response_deserializer=response)
    answer: ResponseT = await call(send, pieces, timeout_seconds=timeout_seconds)
    return answer


async def watch(
    method: Callable[..., "grpc.aio.UnaryStreamCall[Any, ResponseT]"], request: object, *, timeout_seconds: float = 300
) -> AsyncIterator[ResponseT]:
    """Yield the messages of a server stream for ever. The stream is reopened when it ends, fails or times out.

    The stream must send the whole state first, as all Watch methods do, so that no change is missed. Raises errors that
    a retry cannot fix.
    """
    while True:
        try:
            async for message in method(request, timeout=timeout_seconds):
                yield message
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_call(rpc_error)
            if not is_passing(error):
                raise error from None
        await asyncio.sleep(FIRST_BACKOFF_SECONDS)


def is_passing(error: NexrlError) -> bool:
    """Return whether a retry may succeed: the peer was unreachable, or the deadline was too short."""
    return error.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
