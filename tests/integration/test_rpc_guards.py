"""Each of the four kinds of RPC passes each guard of the server: deadline, admission, request id, errors, metrics."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest

from nexrl.errors import NotFoundError
from nexrl.rpc.admission import Admission
from nexrl.rpc.client import connect
from nexrl.rpc.interceptor import HANDLED, HANDLING_SECONDS, EdgeInterceptor
from nexrl.tls import Tls
from nexrl.v1 import validator_service_pb2 as pb
from tests.support.patience import LIMIT_SECONDS

SERVICE = "nexrl.test.FourKinds"
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
Context = grpc.aio.ServicerContext[Any, Any]


class FourKinds:
    """One RPC of each kind, each named for its kind. The request ids that reach it are in `request_ids`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.request_ids: list[str] = []
        self._error = error

    async def unary_unary(self, request: pb.StartValidationRequest, context: Context) -> pb.StartValidationResponse:
        return self._answer(request)

    async def unary_stream(self, request: pb.StartValidationRequest, context: Context) -> Any:
        yield self._answer(request)

    async def stream_unary(self, requests: AsyncIterator[Any], context: Context) -> pb.StartValidationResponse:
        return [self._answer(request) async for request in requests][-1]

    async def stream_stream(self, requests: AsyncIterator[Any], context: Context) -> Any:
        async for request in requests:
            yield self._answer(request)

    def _answer(self, request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        self.request_ids.append(request.request_id)
        if self._error:
            raise self._error
        return pb.StartValidationResponse(samples=7)


@asynccontextmanager
async def serving(servicer: FourKinds, admission: Admission | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a real server of `servicer`, which the interceptor guards."""
    handlers = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(
            getattr(servicer, kind), pb.StartValidationRequest.FromString, pb.StartValidationResponse.SerializeToString
        )
        for kind in KINDS
    }
    server = grpc.aio.server(interceptors=[EdgeInterceptor(admission)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(10)  # ends when every call has ended, and so is counted


async def refused(channel: grpc.aio.Channel, kind: str, seconds: float | None = LIMIT_SECONDS) -> None:
    """Call the RPC of this kind, which is refused before its message is read: a stream sends none.

    A client that sends a message while the refusal arrives may report the failed sending in place of the refusal.
    """
    requests = silence() if kind.startswith("stream") else b""
    method: Callable[..., Any] = getattr(channel, kind)(f"/{SERVICE}/{kind}")
    calling = method(requests, timeout=seconds)
    await (calling.read() if kind.endswith("stream") else calling)


async def silence() -> AsyncIterator[bytes]:
    """A stream of requests in which no request comes."""
    await asyncio.Event().wait()
    yield b""


async def call(channel: grpc.aio.Channel, kind: str, *, request_id: str = "one") -> int:
    """Call the RPC of this kind and return the samples of its last response."""
    return await send(channel, kind, pb.StartValidationRequest(request_id=request_id).SerializeToString())


async def send(channel: grpc.aio.Channel, kind: str, content: bytes) -> int:
    """Send these bytes as the message of a call, and return the samples of its last response."""
    multicallable: Callable[..., Any] = getattr(channel, kind)(
        f"/{SERVICE}/{kind}", response_deserializer=pb.StartValidationResponse.FromString
    )
    calling = multicallable(iter([content]) if kind.startswith("stream") else content, timeout=LIMIT_SECONDS)
    responses = [response async for response in calling] if kind.endswith("stream") else [await calling]
    samples: int = responses[-1].samples
    return samples


def handled(kind: str, code: str) -> float:
    calls: float = HANDLED.labels(SERVICE, kind, code)._value.get()
    return calls


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_with_deadline_and_request_id_is_answered_counted_and_timed(kind: str) -> None:
    before, timed = handled(kind, "OK"), HANDLING_SECONDS.labels(SERVICE, kind)
    sum_before = timed._sum.get()
    async with serving(FourKinds()) as channel:
        assert await call(channel, kind) == 7
    assert handled(kind, "OK") == before + 1
    assert timed._sum.get() > sum_before


async def test_a_status_that_the_servicer_sets_itself_is_counted_as_such() -> None:
    class Refuses(FourKinds):
        async def unary_unary(self, request: pb.StartValidationRequest, context: Context) -> pb.StartValidationResponse:
            await context.abort(grpc.StatusCode.NOT_FOUND, "as gRPC's own health service does")
            raise AssertionError

    before, internal = handled("unary_unary", "NOT_FOUND"), handled("unary_unary", "INTERNAL")
    async with serving(Refuses()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(channel, "unary_unary")
    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND
    assert (handled("unary_unary", "NOT_FOUND"), handled("unary_unary", "INTERNAL")) == (before + 1, internal)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_a_deadline_is_refused(kind: str) -> None:
    async with serving(servicer := FourKinds()) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="deadline: none; every call requires one") as refusal:
            await refused(channel, kind, seconds=None)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert servicer.request_ids == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_caller_without_certificate_or_token_is_refused_where_there_is_an_admission(kind: str) -> None:
    tls = Tls(Path("ca"), "ours.namespace", Path("certificate"), Path("key"))
    before = handled(kind, "UNAUTHENTICATED")
    async with serving(servicer := FourKinds(), Admission(tls)) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="no client certificate") as refusal:
            await refused(channel, kind)
    assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert servicer.request_ids == []
    assert handled(kind, "UNAUTHENTICATED") == before + 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_caller_is_refused_before_its_message_is_read(kind: str) -> None:
    tls = Tls(Path("ca"), "ours.namespace", Path("certificate"), Path("key"))
    async with serving(FourKinds(), Admission(tls)) as channel:
        method: Any = channel.stream_stream(f"/{SERVICE}/{kind}")
        calling = method(silence(), timeout=LIMIT_SECONDS)
        with pytest.raises(grpc.aio.AioRpcError, match="no client certificate") as refusal:
            await calling.read()
    assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_call_that_ends_without_a_message_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = Tls(Path("ca"), "ours.namespace", Path("certificate"), Path("key"))
    monkeypatch.setattr(admission := Admission(tls), "admit", AsyncMock())
    async with serving(servicer := FourKinds(), admission) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="request: the call ended without a message") as refusal:
            await channel.stream_stream(f"/{SERVICE}/{kind}")(iter([]), timeout=LIMIT_SECONDS).read()
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert servicer.request_ids == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_without_its_request_id_is_refused(kind: str) -> None:
    async with serving(servicer := FourKinds()) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="request_id: empty") as refusal:
            await call(channel, kind, request_id="")
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert servicer.request_ids == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content", [b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x07"], ids=["truncated", "not UTF-8", "no field"]
)
async def test_a_malformed_message_is_refused_and_counted(kind: str, content: bytes) -> None:
    before = handled(kind, "INVALID_ARGUMENT")
    async with serving(servicer := FourKinds()) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"request: malformed \(.*StartValidationRequest") as refusal:
            await send(channel, kind, content)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert servicer.request_ids == []
    assert handled(kind, "INVALID_ARGUMENT") == before + 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_over_the_limit_of_its_method_is_refused_with_both_sizes(kind: str) -> None:
    expected = rf"request: {2**20 + 4} bytes; /{SERVICE}/{kind} takes at most {2**20};"
    async with serving(servicer := FourKinds()) as channel:
        assert await call(channel, kind, request_id="x" * (2**20 - 4)) == 7
        with pytest.raises(grpc.aio.AioRpcError, match=expected) as refusal:
            await call(channel, kind, request_id="x" * 2**20)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(servicer.request_ids) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_typed_error_becomes_its_status_and_is_counted(kind: str) -> None:
    before = handled(kind, "NOT_FOUND")
    async with serving(FourKinds(NotFoundError("no such run"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="no such run") as failure:
            await call(channel, kind)
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND
    assert handled(kind, "NOT_FOUND") == before + 1


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unknown_exception_keeps_its_text_from_the_caller(kind: str) -> None:
    before = handled(kind, "INTERNAL")
    async with serving(FourKinds(ZeroDivisionError("a secret"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=f"internal error in {SERVICE}/{kind}") as failure:
            await call(channel, kind)
    assert "secret" not in str(failure.value)
    assert handled(kind, "INTERNAL") == before + 1
