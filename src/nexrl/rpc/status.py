"""Typed errors <-> google.rpc.Status (https://google.aip.dev/193): one mapping, used by servers and clients."""

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from nexrl.errors import NexrlError, Violation, error_class

ERROR_DOMAIN = "nexrl.dev"


def status_from_error(error: NexrlError) -> status_pb2.Status:
    """The status that a server sends for `error`, with ErrorInfo and, where known, BadRequest and RetryInfo."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=error.message)
    status.details.append(_packed(error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=ERROR_DOMAIN)))
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad_request.field_violations.add(field=violation.field, description=violation.description)
        status.details.append(_packed(bad_request))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def error_from_call(call: grpc.aio.AioRpcError) -> NexrlError:
    """The typed error that a failed call stands for; its details are restored when the server sent them."""
    status = rpc_status.from_call(call)  # type: ignore[arg-type]  # an AioRpcError has what it reads: code, details, trailing_metadata
    violations: list[Violation] = []
    retry_after: float | None = None
    for detail in status.details if status else ():
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations = [Violation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry_after = retry_info.retry_delay.ToMilliseconds() / 1000
    # Who cancels a call of its own gets asyncio.CancelledError: this status is a server's that is stopping.
    code = "UNAVAILABLE" if call.code() is grpc.StatusCode.CANCELLED else call.code().name
    return error_class(code)(call.details() or code, violations=violations, retry_after_seconds=retry_after)


def _packed(
    detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
