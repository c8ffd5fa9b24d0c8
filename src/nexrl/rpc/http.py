"""Errors and admission of HTTP servers: the statuses of nexrl.rpc.status, the callers of nexrl.rpc.admission."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from nexrl.errors import NexrlError
from nexrl.rpc.admission import Admission
from nexrl.rpc.status import http_status

OPEN = ("/health", "/metrics")
"""Paths that need no admission. Probes and Prometheus have no certificate, and these paths reveal nothing secret."""


def error_response(error: NexrlError) -> web.Response:
    """Return the response for `error`, with the body of an OpenAI error."""
    status = http_status(error)
    body = {"error": {"message": error.message, "type": type(error).__name__, "code": status}}
    return web.json_response(body, status=status)


def guard(application: web.Application, admission: Admission) -> None:
    """Make `application` refuse callers that `admission` does not admit."""

    @web.middleware
    async def admitted(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN:
            try:
                await admission.admit(_names(request), request.headers.get("Authorization", ""))
            except NexrlError as error:
                return error_response(error)
        return await handler(request)

    application.middlewares.insert(0, admitted)


def _names(request: web.Request) -> list[str]:
    """Return the DNS names in the client's certificate, which the TLS handshake has verified."""
    certificate = (request.transport and request.transport.get_extra_info("peercert")) or {}
    return [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
