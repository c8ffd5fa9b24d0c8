"""An HTTP API behind the same door as the RPCs: certificates or tokens of the experiment."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from nexrl.errors import NexrlError, PermissionDeniedError, UnauthenticatedError
from nexrl.rpc.admission import Admission

OPEN = ("/health", "/metrics")
"""Paths that tell nobody anything, for probes and Prometheus, which have no certificate."""

STATUS: dict[type[NexrlError], int] = {UnauthenticatedError: 401, PermissionDeniedError: 403}


def guard(application: web.Application, admission: Admission) -> None:
    """Have `application` refuse strangers, with the body of an OpenAI error."""

    @web.middleware
    async def admitted(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN:
            try:
                await admission.admit(_names(request), request.headers.get("Authorization", ""))
            except NexrlError as error:
                status = STATUS.get(type(error), 503)
                body = {"error": {"message": error.message, "type": type(error).__name__, "code": status}}
                return web.json_response(body, status=status)
        return await handler(request)

    application.middlewares.insert(0, admitted)


def _names(request: web.Request) -> list[str]:
    """Those of the client's certificate, which the handshake has verified."""
    certificate = (request.transport and request.transport.get_extra_info("peercert")) or {}
    return [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
