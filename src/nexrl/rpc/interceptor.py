"""Guards every RPC on the server: admission, deadline, message, metrics, and errors as statuses."""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram

from nexrl.errors import InvalidArgumentError, NexrlError, UnavailableError, Violation
from nexrl.rpc.admission import Admission
from nexrl.rpc.limits import MAX_PIECE_BYTES, request_limit_bytes
from nexrl.rpc.status import status_from_error
from nexrl.task_cancellation import is_current_task_cancelled

log = logging.getLogger(__name__)

MAX_DEADLINE_SECONDS = 3600.0
PIECE_SECONDS = 20.0
"""Longest time between two pieces of a request."""
WITHOUT_DEADLINE = ("/grpc.health.", "/grpc.reflection.", "/nexrl.v1.TrainerReplicaService/RunRanks")
"""Calls that last as long as their caller. Keepalive ends them if it cannot be reached."""

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
Requests: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
Parse: TypeAlias = Callable[[bytes], Any]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Guards each RPC, of whatever kind, before its servicer sees it.

    It maps typed errors to statuses, counts and times calls, and refuses calls without a deadline or request id. With
    an admission, it also refuses callers that do not belong to the experiment, before it reads their message.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission
        self._assembling = asyncio.Lock()
        self._guarded: dict[str, Handler] = {}
        """By method, because gRPC asks for the handler of each call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = self._guard(handler, method)
        return self._guarded[method]

    def _guard(self, handler: Handler, method: str) -> Handler:
        edge = partial(_edge, method=method, admission=self._admission)
        parse = partial(_request, handler=handler, method=method)
        if request_limit_bytes(method) > MAX_PIECE_BYTES:
            guarded = _guard_pieces(_behaviour(handler), edge, parse, self._assembling, method)
            return grpc.stream_unary_rpc_method_handler(guarded, None, handler.response_serializer)
        if handler.request_streaming:
            make, requests = _MAKE_STREAM, partial(_each, parse=parse)
        elif self._admission is None:
            make, requests = _MAKE_UNARY, partial(_received, parse=parse)  # quicker, and there is nobody to refuse
        else:
            # gRPC reads a unary request before it calls the handler. So this handler is one for a stream of requests,
            # which is the same on the wire: its message is read and parsed here, after the admission.
            make, requests = _MAKE_STREAM, partial(_read, parse=parse)
        guard = _guard_stream if handler.response_streaming else _guard_unary
        guarded = guard(_behaviour(handler), edge, requests)
        return make[handler.response_streaming](guarded, None, handler.response_serializer)


_MAKE_UNARY = (grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler)
_MAKE_STREAM = (grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler)


def _behaviour(handler: Handler) -> Callable[..., Any]:
    kind = "_".join("stream" if is_stream else "unary" for is_stream in _streaming(handler))
    behaviour: Callable[..., Any] = getattr(handler, kind)
    return behaviour


def _streaming(handler: Handler) -> tuple[bool, bool]:
    return handler.request_streaming, handler.response_streaming


def _guard_unary(behaviour: Callable[..., Any], edge: Edge, requests: Requests) -> Callable[..., Any]:
    async def guarded(messages: Any, context: Context) -> Any:
        async with edge(context):
            return await behaviour(await requests(messages, context), context)

    return guarded


def _guard_stream(behaviour: Callable[..., Any], edge: Edge, requests: Requests) -> Callable[..., Any]:
    async def guarded(messages: Any, context: Context) -> AsyncIterator[Any]:
        async with edge(context):
            answers = behaviour(await requests(messages, context), context)
            if inspect.iscoroutine(answers):  # it writes to the context, as gRPC's own health service does
                await answers
                return
            async for message in answers:
                yield message

    return guarded


def _guard_pieces(
    behaviour: Callable[..., Any], edge: Edge, parse: Parse, assembling: asyncio.Lock, method: str
) -> Callable[..., Any]:
    """Guard a unary method whose request may come in pieces. `assembling` admits one such request at a time."""

    async def guarded(_: Any, context: Context) -> Any:
        async with edge(context):
            pieces = [await _message(context)]
            if (piece := await context.read()) is grpc.aio.EOF:
                return await behaviour(parse(pieces.pop()), context)
            async with assembling:
                size = len(pieces[0])
                while piece is not grpc.aio.EOF:
                    _require_size(size := size + len(piece), method)
                    pieces.append(piece)
                    piece = await _next_piece(context)
                request = parse(b"".join(pieces))
                pieces.clear()  # the handler may take minutes
                return await behaviour(request, context)

    return guarded


async def _next_piece(context: Context) -> Any:
    """Read on. Raises UnavailableError if the caller is silent, because other requests in pieces wait for this one."""
    try:
        async with asyncio.timeout(PIECE_SECONDS):
            return await context.read()
    except TimeoutError:
        raise UnavailableError(f"request: its next piece did not arrive within {PIECE_SECONDS:g} s") from None


async def _each(messages: AsyncIterator[bytes], _: Context, parse: Parse) -> AsyncIterator[Any]:
    return (parse(message) async for message in messages)


async def _received(message: bytes, _: Context, parse: Parse) -> Any:
    return parse(message)


async def _read(_: Any, context: Context, parse: Parse) -> Any:
    return parse(await _message(context))


async def _message(context: Context) -> bytes:
    """Read a message of a call. Raises InvalidArgumentError if the call has none."""
    message = await context.read()
    if message is grpc.aio.EOF:
        raise InvalidArgumentError("request: the call ended without a message; send one")
    return cast(bytes, message)


def _request(message: bytes, handler: Handler, method: str) -> Any:
    """Parse a message. Raises InvalidArgumentError if it is too large or malformed, or its request id is empty."""
    _require_size(len(message), method)
    try:
        request = handler.request_deserializer(message)  # type: ignore[misc]  # generated code always has one
    except DecodeError as error:
        wrong = Violation("request", f"malformed ({error}); send a protobuf message of this type")
        raise InvalidArgumentError(str(wrong), violations=[wrong]) from None
    _require_request_id(request)
    return request


@asynccontextmanager
async def _edge(context: Context, method: str, admission: Admission | None) -> AsyncGenerator[None, None]:
    service, name = method.lstrip("/").split("/")
    began, code = time.monotonic(), "OK"
    try:
        if admission:
            await _admit(context, admission)
        if not method.startswith(WITHOUT_DEADLINE):
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
        await _abort(context, UnavailableError(f"{service}/{name} was cancelled by the service"))
    except GeneratorExit:
        code = "CANCELLED"
        raise
    except grpc.aio.AbortError:  # the servicer has answered, as gRPC's own health service does
        code = grpc.StatusCode(context.code()).name
        raise
    except Exception:
        code = "INTERNAL"
        log.exception("%s/%s failed", service, name)
        await _abort(context, NexrlError(f"internal error in {service}/{name}; see the service's log"))
    finally:
        HANDLED.labels(service, name, code).inc()
        HANDLING_SECONDS.labels(service, name).observe(time.monotonic() - began)


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


def _require_size(size: int, method: str) -> None:
    if size > (limit := request_limit_bytes(method)):
        wrong = Violation("request", f"{size} bytes; {method} takes at most {limit}; send less in one call")
        raise InvalidArgumentError(str(wrong), violations=[wrong])


def _require_request_id(request: Any) -> None:
    """Raise InvalidArgumentError for an empty request id: a retry of the call would act twice."""
    if "request_id" in request.DESCRIPTOR.fields_by_name and not request.request_id:
        wrong = Violation("request_id", "empty; use a text that is unique to the call and the same in its retries")
        raise InvalidArgumentError(str(wrong), violations=[wrong])


async def _abort(context: Context, error: NexrlError) -> None:
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
