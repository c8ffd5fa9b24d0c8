"""Calls between services over real sockets: deadlines, typed errors, retries, size and silence."""

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from nexrl.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    LeaseLostError,
    NexrlError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)
from nexrl.rpc import server
from nexrl.rpc.client import call, connect, watch
from nexrl.v1 import validator_service_pb2 as pb
from nexrl.v1 import weight_sync_service_pb2 as stream_pb
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.services import running_service
from tests.support.validator import (
    SERVICE,
    ValidatorServicer,
    answer_seven,
    handled,
    raising,
    serving,
    start_validation,
)


async def test_a_call_that_finds_the_server_full_is_repeated_when_it_says(tmp_path: Path) -> None:
    attempts = 0

    async def full_at_first(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ResourceExhaustedError("full", retry_after_seconds=0.01)
        return pb.StartValidationResponse(samples=attempts)

    async with running_service(tmp_path, serving(ValidatorServicer(full_at_first))) as process:
        assert (await start_validation(process.address)).samples == 2


async def test_a_call_without_a_deadline_is_refused(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path, serving(servicer := ValidatorServicer())) as process,
        connect(process.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="every call requires one") as refusal:
            await ValidatorServiceStub(channel).StartValidation(pb.StartValidationRequest())
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert servicer.request_ids == []


async def test_a_call_that_could_not_be_repeated_safely_is_refused(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path, serving(servicer := ValidatorServicer())) as process,
        connect(process.address) as channel,
    ):
        start, request = ValidatorServiceStub(channel).StartValidation, pb.StartValidationRequest()
        with pytest.raises(InvalidArgumentError, match="request_id: empty"):
            await call(start, request, timeout_seconds=LIMIT_SECONDS)
    assert servicer.request_ids == []


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("wrong", violations=[Violation("a.b", "at least 1"), Violation("c", "text")]),
        LeaseLostError("late"),
        ResourceExhaustedError("full", retry_after_seconds=30),
        NexrlError("plain"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_typed_error_arrives_as_it_was_raised(tmp_path: Path, error: NexrlError) -> None:
    before = handled(error.status)
    async with running_service(tmp_path, serving(ValidatorServicer(raising(error)))) as process:
        with pytest.raises(type(error)) as arrived:
            await start_validation(process.address)
    assert type(arrived.value) is type(error)
    assert (arrived.value.message, arrived.value.violations) == (error.message, error.violations)
    assert arrived.value.retry_after_seconds == error.retry_after_seconds
    assert handled(error.status) == before + 1


async def test_an_unknown_exception_says_nothing_of_itself_on_the_wire_and_is_counted(tmp_path: Path) -> None:
    before = handled("INTERNAL")
    async with running_service(tmp_path, serving(ValidatorServicer(raising(ZeroDivisionError("a secret"))))) as process:
        with pytest.raises(NexrlError, match=f"internal error in {SERVICE}/StartValidation") as arrived:
            await start_validation(process.address)
    assert "secret" not in arrived.value.message
    assert handled("INTERNAL") == before + 1


async def test_an_unknown_exception_in_a_stream_says_nothing_of_itself_either(tmp_path: Path) -> None:
    service = "nexrl.v1.WeightSyncService"
    before = handled("INTERNAL", service, "WatchReplicas")
    async with running_service(tmp_path, serving(ValidatorServicer())) as process, connect(process.address) as channel:
        stream = watch(WeightSyncServiceStub(channel).WatchReplicas, stream_pb.WatchReplicasRequest())
        assert (await anext(stream)).committed_version == 1
        with pytest.raises(NexrlError, match="internal error") as arrived:
            await anext(stream)
    assert "secret" not in arrived.value.message
    assert handled("INTERNAL", service, "WatchReplicas") == before + 1


async def test_a_call_that_was_called_off_is_counted_as_such(tmp_path: Path) -> None:
    before, entered, called_off = handled("CANCELLED"), asyncio.Event(), asyncio.Event()

    async def wait(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            called_off.set()
        raise AssertionError

    async with running_service(tmp_path, serving(ValidatorServicer(wait))) as process:
        calling = asyncio.create_task(start_validation(process.address))
        await entered.wait()
        calling.cancel()
        await called_off.wait()
    assert handled("CANCELLED") == before + 1


async def test_a_call_whose_work_is_given_up_by_the_service_is_answered_at_once(tmp_path: Path) -> None:
    before = handled("UNAVAILABLE")
    servicer = ValidatorServicer(raising(asyncio.CancelledError()))
    async with running_service(tmp_path, serving(servicer)) as process, connect(process.address) as channel:
        request = pb.StartValidationRequest(request_id="one")
        with pytest.raises(grpc.aio.AioRpcError, match="cancelled by the service") as arrived:
            await ValidatorServiceStub(channel).StartValidation(request, timeout=LIMIT_SECONDS)
    assert arrived.value.code() == grpc.StatusCode.UNAVAILABLE
    assert handled("UNAVAILABLE") == before + 1


@pytest.mark.guide("P1")
async def test_a_peer_that_is_away_is_waited_for_and_asked_again_with_the_same_request_id(tmp_path: Path) -> None:
    refusals = [UnavailableError("later"), UnavailableError("later")]

    async def refuse_twice(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        if refusals:
            raise refusals.pop()
        return await answer_seven(request)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    calling = asyncio.create_task(start_validation(address, timeout_seconds=LIMIT_SECONDS))
    servicer = ValidatorServicer(refuse_twice)
    async with running_service(tmp_path, serving(servicer), listen=address):
        assert (await calling).samples == 7
    assert servicer.request_ids == ["one"] * 3


async def test_a_peer_that_stays_away_is_waited_for_until_the_deadline_only() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and never listened on
        calling = start_validation(f"127.0.0.1:{taken.getsockname()[1]}", timeout_seconds=0.5)
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await finished(calling, "the deadline ends the call")


async def test_a_message_over_the_limit_is_a_typed_error_that_names_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "message_limit_bytes", lambda role: 1000)
    async with running_service(tmp_path, serving(ValidatorServicer())) as process, connect(process.address) as channel:
        request = pb.StartValidationRequest(request_id="x" * 1001)
        with pytest.raises(ResourceExhaustedError, match=r"larger than max \(\d+ vs\. 1000\)"):
            await call(ValidatorServiceStub(channel).StartValidation, request, timeout_seconds=LIMIT_SECONDS)


async def test_a_call_may_wait_long_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings keep its connection; here of 1 s, the shortest that gRPC allows, with the server's limit below, as ours."""
    faster = [(name, 500 if "ping_interval" in name else value) for name, value in server.SERVER_OPTIONS]
    monkeypatch.setattr(server, "SERVER_OPTIONS", [*faster, ("grpc.http2.max_ping_strikes", 1)])

    async def take_four_seconds(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        await asyncio.sleep(4)  # three pings: with two too many the connection is closed
        return pb.StartValidationResponse(samples=7)

    options = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    async with (
        running_service(tmp_path, serving(ValidatorServicer(take_four_seconds))) as process,
        grpc.aio.insecure_channel(process.address, options=options) as channel,
    ):
        request = pb.StartValidationRequest(request_id="1")
        assert (await ValidatorServiceStub(channel).StartValidation(request, timeout=LIMIT_SECONDS)).samples == 7
