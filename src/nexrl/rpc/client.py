"""Channels and calls. Every call has a deadline; a peer that is restarting is waited for until then."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc

from nexrl.errors import NexrlError, UnavailableError
from nexrl.rpc.channel import RenewedChannel
from nexrl.rpc.status import error_from_call
from nexrl.tls import Tls, tls_from_environment

MAX_MESSAGE_BYTES = 2**31 - 1
"""Largest message that either side takes: what protobuf can hold, for a train batch may be nearly as large."""

CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.dns_min_time_between_resolutions_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Retries are ours, in `call`, where a repeated request carries the same request_id; gRPC's own would multiply them.
    ("grpc.enable_retries", 0),
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
]

FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0

ResponseT = TypeVar("ResponseT")


def connect(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `address` (host:port, or dns:///name:port for every pod of a headless Service).

    With TLS as `tls` says, or else the environment (NEXRL_TLS_*). Raises InvalidArgumentError for wrong settings.
    """
    tls = tls or tls_from_environment()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return RenewedChannel(address, tls, CLIENT_OPTIONS)


def shows_token() -> bool:
    """Whether this process shows a token instead of a certificate, so that other addresses are for it."""
    tls = tls_from_environment()
    return tls is not None and tls.token is not None


def new_request_id() -> str:
    """A fresh request id: make one for each call, and keep it in the call's retries."""
    return uuid.uuid4().hex


async def call(
    method: Callable[..., "grpc.aio.UnaryUnaryCall[Any, ResponseT]"], request: object, *, timeout_seconds: float
) -> ResponseT:
    """Call `method` within `timeout_seconds`, again while the peer is away, and when it says so while it is full.

    Raises the `NexrlError` that the server sent; `UnavailableError` or `DeadlineExceededError` when time ran out.
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


async def watch(
    method: Callable[..., "grpc.aio.UnaryStreamCall[Any, ResponseT]"], request: object, *, timeout_seconds: float = 300
) -> AsyncIterator[ResponseT]:
    """Follow a server stream without end: opened again when it ends, breaks, or reaches `timeout_seconds`.

    The stream must send the whole state first, as all our Watch methods do, so that nothing is missed between two.
    Raises errors that opening it again cannot mend.
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
    """True for an error that may be gone at the next try: a peer that restarts, or a wait that was too short."""
    return error.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
