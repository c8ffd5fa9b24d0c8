"""Guards every RPC on the server: admission, deadline, message, metrics, and errors as statuses."""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram

from nexrl.errors import InvalidArgumentError, NexrlError, UnavailableError, Violation
from nexrl.rpc.admission import Admission
from nexrl.rpc.limits import request_limit_bytes
from nexrl.rpc.status import status_from_error
from nexrl.task_cancellation import is_current_task_cancelled

log = logging.getLogger(__name__)

MAX_DEADLINE_SECONDS = 3600.0
WITHOUT_DEADLINE = ("/grpc.health.", "/grpc.reflection.")

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
Requests: TypeAlias = Callable[[Any], Awaitable[Any]]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Guards each RPC, of whatever kind, before its servicer sees it.

    It maps typed errors to statuses, counts and times calls, and refuses calls without a deadline or request id. With
    an admission, it also refuses callers that do not belong to the experiment, before it reads their message.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        edge = partial(_edge, method=method, admission=self._admission)
        guard = _guard_stream if handler.response_streaming else _guard_unary
        if self._admission is None and not handler.request_streaming:
            make = _MAKE_UNARY[handler.response_streaming]  # quicker, and there is nobody to refuse
            requests = partial(_one_request, handler=handler, method=method)
        else:
            # gRPC reads a unary request before it calls the handler. So every handler is one for a stream of requests,
            # which is the same on the wire: its message is read and parsed here, after the admission.
            make = _MAKE_STREAM[handler.response_streaming]
            requests = partial(_requests, handler=handler, method=method)
        return make(guard(_behaviour(handler), edge, requests), None, handler.response_serializer)


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
            return await behaviour(await requests(messages), context)

    return guarded


def _guard_stream(behaviour: Callable[..., Any], edge: Edge, requests: Requests) -> Callable[..., Any]:
    async def guarded(messages: Any, context: Context) -> AsyncIterator[Any]:
        async with edge(context):
            answers = behaviour(await requests(messages), context)
            if inspect.iscoroutine(answers):  # it writes to the context, as gRPC's own health service does
                await answers
                return
            async for message in answers:
                yield message

    return guarded


async def _requests(messages: AsyncIterator[bytes], handler: Handler, method: str) -> Any:
    """Return the request, or the stream of requests, as the handler takes it. Each message is checked when read."""
    checked = (_request(message, handler, method) async for message in messages)
    if handler.request_streaming:
        return checked
    async for request in checked:
        return request
    raise InvalidArgumentError("request: the call ended without a message; send one")


async def _one_request(message: bytes, handler: Handler, method: str) -> Any:
    return _request(message, handler, method)


def _request(message: bytes, handler: Handler, method: str) -> Any:
    """Parse a message. Raises InvalidArgumentError if it is too large or malformed, or its request id is empty."""
    if len(message) > (limit := request_limit_bytes(method)):
        wrong = Violation("request", f"{len(message)} bytes; {method} takes at most {limit}; send less in one call")
        raise InvalidArgumentError(str(wrong), violations=[wrong])
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


def _require_request_id(request: Any) -> None:
    """Raise InvalidArgumentError for an empty request id: a retry of the call would act twice."""
    if "request_id" in request.DESCRIPTOR.fields_by_name and not request.request_id:
        wrong = Violation("request_id", "empty; use a text that is unique to the call and the same in its retries")
        raise InvalidArgumentError(str(wrong), violations=[wrong])


async def _abort(context: Context, error: NexrlError) -> None:
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
