"""Maps typed errors to and from google.rpc.Status (https://google.aip.dev/193), and to HTTP status codes."""

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from nexrl.errors import NexrlError, Violation, error_class

ERROR_DOMAIN = "nexrl.dev"
MAX_TEXT_BYTES = 1200
ENOUGH_VIOLATIONS_BYTES = 800
"""Both keep the trailing metadata below gRPC's default limit of 8 KiB. It contains the message twice, once encoded."""

HTTP_STATUS: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    # google.rpc says 400, but the request is well-formed: a replica without weights must be asked again later.
    "FAILED_PRECONDITION": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status code for each gRPC status that a NexrlError has, as in google/rpc/code.proto."""


def http_status(error: NexrlError) -> int:
    """Return the HTTP status code that an HTTP server sends for `error`."""
    return HTTP_STATUS[error.status]


def status_from_error(error: NexrlError) -> status_pb2.Status:
    """Return the gRPC status for `error`, with ErrorInfo and, if the error has them, BadRequest and RetryInfo.

    What exceeds the limits is cut off: of many violations the first are sent.
    """
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=_cut(error.message))
    status.details.append(_packed(error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=ERROR_DOMAIN)))
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            if bad_request.ByteSize() < ENOUGH_VIOLATIONS_BYTES:
                bad_request.field_violations.add(field=violation.field[:200], description=_cut(violation.description))
        status.details.append(_packed(bad_request))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def error_from_call(call: grpc.aio.AioRpcError) -> NexrlError:
    """Return the typed error for a failed call, with the violations and retry time that the server sent."""
    try:
        status = rpc_status.from_call(call)  # type: ignore[arg-type]  # an AioRpcError has what it reads: code, details, trailing_metadata
    except ValueError:  # gRPC has replaced the server's code by one of its own
        status = None
    violations: list[Violation] = []
    retry_after: float | None = None
    for detail in status.details if status else ():
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations = [Violation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry_after = retry_info.retry_delay.ToMilliseconds() / 1000
    # A stopping server sends CANCELLED. (A client that cancels its own call gets asyncio.CancelledError instead.)
    code = "UNAVAILABLE" if call.code() is grpc.StatusCode.CANCELLED else call.code().name
    return error_class(code)(call.details() or code, violations=violations, retry_after_seconds=retry_after)


def _cut(text: str) -> str:
    encoded = text.encode()
    if len(encoded) <= MAX_TEXT_BYTES:
        return text
    return encoded[:MAX_TEXT_BYTES].decode(errors="ignore") + " ..."


def _packed(
    detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
