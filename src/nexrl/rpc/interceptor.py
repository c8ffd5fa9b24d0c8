"""Guards every RPC on the server: admission, deadline, message, metrics, and errors as statuses."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram

from nexrl.errors import InvalidArgumentError, NexrlError, UnavailableError, Violation
from nexrl.rpc.admission import Admission
from nexrl.rpc.status import status_from_error
from nexrl.task_cancellation import is_current_task_cancelled

log = logging.getLogger(__name__)

MAX_DEADLINE_SECONDS = 3600.0
EXEMPT = ("grpc.health.", "grpc.reflection.")

HANDLED = Counter("grpc_server_handled_total", "RPCs completed.", ["grpc_service", "grpc_method", "grpc_code"])
HANDLING_SECONDS = Histogram(
    "grpc_server_handling_seconds",
    "Time from the arrival of an RPC to its response, waits included.",
    ["grpc_service", "grpc_method"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Edge: TypeAlias = Callable[[Context], AbstractAsyncContextManager[None]]
Parse: TypeAlias = Callable[[bytes], Any]


MAKE_HANDLER: Mapping[str, Callable[..., Handler]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
"""How gRPC makes the handler of each kind of RPC: unary or stream request, unary or stream response."""


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Guards each RPC, of whatever kind, before its servicer sees it.

    It maps typed errors to statuses, counts and times calls, and refuses calls without a deadline or request id. With
    an admission, it also refuses callers that do not belong to the experiment. Health and reflection are exempt.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.lstrip("/").startswith(EXEMPT):
            return handler
        service, method = handler_call_details.method.lstrip("/").split("/")
        edge = partial(_edge, service=service, method=method, admission=self._admission)
        kind = "_".join("stream" if is_stream else "unary" for is_stream in _streaming(handler))
        guard = _guard_stream if handler.response_streaming else _guard_unary
        parse = partial(_parsed, parse=handler.request_deserializer)
        # The edge parses the messages: gRPC would answer UNKNOWN to one that is malformed.
        return MAKE_HANDLER[kind](guard(getattr(handler, kind), edge, parse), None, handler.response_serializer)


def _streaming(handler: Handler) -> tuple[bool, bool]:
    return handler.request_streaming, handler.response_streaming


def _guard_unary(behaviour: Callable[..., Any], edge: Edge, parse: Parse) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> Any:
        async with edge(context):
            return await behaviour(parse(request), context)

    return guarded


def _guard_stream(behaviour: Callable[..., Any], edge: Edge, parse: Parse) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        async with edge(context):
            async for message in behaviour(parse(request), context):
                yield message

    return guarded


def _parsed(request: Any, parse: Parse) -> Any:
    """Return the request, or the stream of requests, after a check of each message and its request id."""
    if isinstance(request, AsyncIterable):
        return (_message(one, parse) async for one in request)
    return _message(request, parse)


def _message(content: bytes, parse: Parse) -> Any:
    """Parse a message. Raises InvalidArgumentError if it is malformed or its request id is empty."""
    try:
        message = parse(content)
    except DecodeError as error:
        wrong = Violation("request", f"malformed ({error}); send a protobuf message of this type")
        raise InvalidArgumentError(str(wrong), violations=[wrong]) from None
    _require_request_id(message)
    return message


@asynccontextmanager
async def _edge(context: Context, service: str, method: str, admission: Admission | None) -> AsyncGenerator[None, None]:
    began, code = time.monotonic(), "OK"
    try:
        if admission:
            await _admit(context, admission)
        _require_deadline(context)
        yield
    except NexrlError as error:
        code = error.status
        await _abort(context, error)
    except asyncio.CancelledError:
        if is_current_task_cancelled():  # by the client, its deadline, or the end of the drain
            code = "CANCELLED"
            raise
        # The service cancelled what the handler awaits. Without this answer the caller would wait until its deadline.
        code = UnavailableError.status
        await _abort(context, UnavailableError(f"{service}/{method} was cancelled by the service"))
    except GeneratorExit:
        code = "CANCELLED"
        raise
    except Exception:
        code = "INTERNAL"
        log.exception("%s/%s failed", service, method)
        await _abort(context, NexrlError(f"internal error in {service}/{method}; see the service's log"))
    finally:
        HANDLED.labels(service, method, code).inc()
        HANDLING_SECONDS.labels(service, method).observe(time.monotonic() - began)


async def _admit(context: Context, admission: Admission) -> None:
    names = context.auth_context().get("x509_subject_alternative_name", ())
    authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
    await admission.admit((name.decode() for name in names), str(authorization))


def _require_deadline(context: Context) -> None:
    remaining = context.time_remaining()
    if remaining is None or remaining > MAX_DEADLINE_SECONDS:
        found = "none" if remaining is None else f"{remaining:.0f} s"
        raise InvalidArgumentError(
            f"deadline: {found}; every call requires one of at most {MAX_DEADLINE_SECONDS:.0f} s"
        )


def _require_request_id(request: Any) -> None:
    """Raise InvalidArgumentError for an empty request id: a retry of the call would act twice."""
    if "request_id" in request.DESCRIPTOR.fields_by_name and not request.request_id:
        wrong = Violation("request_id", "empty; use a text that is unique to the call and the same in its retries")
        raise InvalidArgumentError(str(wrong), violations=[wrong])


async def _abort(context: Context, error: NexrlError) -> None:
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
