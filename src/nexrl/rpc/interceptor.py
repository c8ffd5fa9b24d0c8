"""What every RPC passes on the server: checks of deadline and request id, request metrics, error mapping."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram

from nexrl.errors import InvalidArgumentError, NexrlError, Violation
from nexrl.rpc.status import status_from_error

log = logging.getLogger(__name__)

MAX_DEADLINE_SECONDS = 3600.0
EXEMPT_FROM_DEADLINE = ("grpc.health.", "grpc.reflection.")

HANDLED = Counter("grpc_server_handled_total", "RPCs completed.", ["grpc_service", "grpc_method", "grpc_code"])
HANDLING_SECONDS = Histogram(
    "grpc_server_handling_seconds",
    "Time from the arrival of an RPC to its answer, waits included.",
    ["grpc_service", "grpc_method"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Turns typed errors into statuses, counts and times calls, and refuses calls without a deadline or request id."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.lstrip("/").startswith(EXEMPT_FROM_DEADLINE):
            return handler
        service, method = handler_call_details.method.lstrip("/").split("/")
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, service, method), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, service, method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler


def _unary(behaviour: Callable[..., Any], service: str, method: str) -> Callable[..., Any]:
    async def edge(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with _edge(context, service, method):
            _require_request_id(request)
            return await behaviour(request, context)

    return edge


def _stream(behaviour: Callable[..., Any], service: str, method: str) -> Callable[..., Any]:
    async def edge(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with _edge(context, service, method):
            async for message in behaviour(request, context):
                yield message

    return edge


@asynccontextmanager
async def _edge(context: grpc.aio.ServicerContext[Any, Any], service: str, method: str) -> AsyncGenerator[None, None]:
    began, code = time.monotonic(), "OK"
    try:
        _require_deadline(context)
        yield
    except NexrlError as error:
        code = error.status
        await _abort(context, error)
    except (asyncio.CancelledError, GeneratorExit):  # by the client, its deadline, or the end of the drain
        code = "CANCELLED"
        raise
    except Exception:
        code = "INTERNAL"
        log.exception("%s/%s failed", service, method)
        await _abort(context, NexrlError(f"internal error in {service}/{method}; the service's log has it"))
    finally:
        HANDLED.labels(service, method, code).inc()
        HANDLING_SECONDS.labels(service, method).observe(time.monotonic() - began)


def _require_deadline(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    remaining = context.time_remaining()
    if remaining is None or remaining > MAX_DEADLINE_SECONDS:
        found = "none" if remaining is None else f"{remaining:.0f} s"
        raise InvalidArgumentError(f"deadline: {found}; every call needs one of at most {MAX_DEADLINE_SECONDS:.0f} s")


def _require_request_id(request: Any) -> None:
    """Without one, a repeated call would act twice."""
    if "request_id" in request.DESCRIPTOR.fields_by_name and not request.request_id:
        wrong = Violation("request_id", "empty; a text that is unique for each call, the same in its retries")
        raise InvalidArgumentError(str(wrong), violations=[wrong])


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: NexrlError) -> None:
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
