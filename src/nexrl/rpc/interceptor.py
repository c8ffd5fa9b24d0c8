"""What every RPC passes on the server: who calls, checks of deadline and request id, request metrics, error mapping."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram

from nexrl.cancellation import is_called_off
from nexrl.errors import InvalidArgumentError, NexrlError, UnavailableError, Violation
from nexrl.rpc.admission import Admission
from nexrl.rpc.status import status_from_error

log = logging.getLogger(__name__)

MAX_DEADLINE_SECONDS = 3600.0
EXEMPT = ("grpc.health.", "grpc.reflection.")

HANDLED = Counter("grpc_server_handled_total", "RPCs completed.", ["grpc_service", "grpc_method", "grpc_code"])
HANDLING_SECONDS = Histogram(
    "grpc_server_handling_seconds",
    "Time from the arrival of an RPC to its answer, waits included.",
    ["grpc_service", "grpc_method"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Edge: TypeAlias = Callable[[Context], AbstractAsyncContextManager[None]]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Turns typed errors into statuses, counts and times calls, and refuses calls without a deadline or request id.

    With an admission, also those of strangers.
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
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, edge), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, edge),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler


def _unary(behaviour: Callable[..., Any], edge: Edge) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> Any:
        async with edge(context):
            _require_request_id(request)
            return await behaviour(request, context)

    return guarded


def _stream(behaviour: Callable[..., Any], edge: Edge) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        async with edge(context):
            async for message in behaviour(request, context):
                yield message

    return guarded


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
        if is_called_off():  # by the client, its deadline, or the end of the drain
            code = "CANCELLED"
            raise
        # What the handler waited for was given up: gRPC would leave the caller without an answer until its deadline.
        code = UnavailableError.status
        await _abort(context, UnavailableError(f"{service}/{method} was given up by the service"))
    except GeneratorExit:
        code = "CANCELLED"
        raise
    except Exception:
        code = "INTERNAL"
        log.exception("%s/%s failed", service, method)
        await _abort(context, NexrlError(f"internal error in {service}/{method}; the service's log has it"))
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
        raise InvalidArgumentError(f"deadline: {found}; every call needs one of at most {MAX_DEADLINE_SECONDS:.0f} s")


def _require_request_id(request: Any) -> None:
    """Without one, a repeated call would act twice."""
    if "request_id" in request.DESCRIPTOR.fields_by_name and not request.request_id:
        wrong = Violation("request_id", "empty; a text that is unique for each call, the same in its retries")
        raise InvalidArgumentError(str(wrong), violations=[wrong])


async def _abort(context: Context, error: NexrlError) -> None:
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
