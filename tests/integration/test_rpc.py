"""The plumbing of every service, over real sockets: deadlines, errors, retries, health, drain, metrics."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from nexrl.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NexrlError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)
from nexrl.rpc import server
from nexrl.rpc.client import MAX_MESSAGE_BYTES, call, connect, watch
from nexrl.rpc.interceptor import HANDLED
from nexrl.rpc.server import ServiceProcess
from nexrl.v1 import validator_service_pb2 as pb
from nexrl.v1 import weight_sync_service_pb2 as stream_pb
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub, add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub, add_WeightSyncServiceServicer_to_server
from tests.support.rollout import Fake
from tests.support.services import running_service, small_experiment

SERVICE = "nexrl.v1.ValidatorService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[pb.StartValidationRequest], Awaitable[pb.StartValidationResponse]]


async def answer_seven(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
    return pb.StartValidationResponse(samples=7)


class Servicer(Fake):
    """StartValidation does what the test says and keeps the request ids; WatchReplicas streams, then fails."""

    def __init__(self, behaviour: Behaviour = answer_seven) -> None:
        super().__init__()
        self.behaviour = behaviour
        self.request_ids: list[str] = []

    async def StartValidation(self, request: pb.StartValidationRequest, context: Context) -> pb.StartValidationResponse:
        self.request_ids.append(request.request_id)
        return await self.behaviour(request)

    async def WatchReplicas(
        self, request: stream_pb.WatchReplicasRequest, context: Context
    ) -> AsyncIterator[stream_pb.WatchReplicasResponse]:
        yield stream_pb.WatchReplicasResponse(committed_version=1)
        raise ZeroDivisionError("a secret")


def serving(servicer: Servicer, *, is_ready: bool = True) -> Callable[[ServiceProcess], Awaitable[None]]:
    async def start(process: ServiceProcess) -> None:
        process.add(add_ValidatorServiceServicer_to_server, servicer, SERVICE)
        process.add(add_WeightSyncServiceServicer_to_server, servicer, "nexrl.v1.WeightSyncService")
        if is_ready:
            await process.set_ready()

    return start


async def start_validation(address: str, *, timeout_seconds: float = 10) -> pb.StartValidationResponse:
    async with connect(address) as channel:
        request = pb.StartValidationRequest(request_id="one")
        return await call(ValidatorServiceStub(channel).StartValidation, request, timeout_seconds=timeout_seconds)


def handled(code: str, service: str = SERVICE, method: str = "StartValidation") -> float:
    return float(HANDLED.labels(service, method, code)._value.get())


def raising(error: BaseException) -> Behaviour:
    async def behaviour(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        raise error

    return behaviour


async def test_a_call_that_finds_the_server_full_is_repeated_when_it_says(tmp_path: Path) -> None:
    attempts = 0

    async def full_at_first(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ResourceExhaustedError("full", retry_after_seconds=0.01)
        return pb.StartValidationResponse(samples=attempts)

    async with running_service(tmp_path, serving(Servicer(full_at_first))) as process:
        assert (await start_validation(process.address)).samples == 2


async def test_a_call_without_a_deadline_is_refused(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path, serving(servicer := Servicer())) as process,
        connect(process.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="every call needs one") as refusal:
            await ValidatorServiceStub(channel).StartValidation(pb.StartValidationRequest())
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert servicer.request_ids == []


async def test_a_call_that_could_not_be_repeated_safely_is_refused(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path, serving(servicer := Servicer())) as process,
        connect(process.address) as channel,
    ):
        with pytest.raises(InvalidArgumentError, match="request_id: empty"):
            await call(ValidatorServiceStub(channel).StartValidation, pb.StartValidationRequest(), timeout_seconds=5)
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
    async with running_service(tmp_path, serving(Servicer(raising(error)))) as process:
        with pytest.raises(type(error)) as arrived:
            await start_validation(process.address)
    assert type(arrived.value) is type(error)
    assert (arrived.value.message, arrived.value.violations) == (error.message, error.violations)
    assert arrived.value.retry_after_seconds == error.retry_after_seconds
    assert handled(error.status) == before + 1


async def test_an_unknown_exception_says_nothing_of_itself_on_the_wire_and_is_counted(tmp_path: Path) -> None:
    before = handled("INTERNAL")
    async with running_service(tmp_path, serving(Servicer(raising(ZeroDivisionError("a secret"))))) as process:
        with pytest.raises(NexrlError, match=f"internal error in {SERVICE}/StartValidation") as arrived:
            await start_validation(process.address)
    assert "secret" not in arrived.value.message
    assert handled("INTERNAL") == before + 1


async def test_an_unknown_exception_in_a_stream_says_nothing_of_itself_either(tmp_path: Path) -> None:
    service = "nexrl.v1.WeightSyncService"
    before = handled("INTERNAL", service, "WatchReplicas")
    async with running_service(tmp_path, serving(Servicer())) as process, connect(process.address) as channel:
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

    async with running_service(tmp_path, serving(Servicer(wait))) as process:
        calling = asyncio.create_task(start_validation(process.address))
        await entered.wait()
        calling.cancel()
        await called_off.wait()
    assert handled("CANCELLED") == before + 1


async def test_a_call_whose_work_is_given_up_by_the_service_is_answered_at_once(tmp_path: Path) -> None:
    before = handled("UNAVAILABLE")
    servicer = Servicer(raising(asyncio.CancelledError()))
    async with running_service(tmp_path, serving(servicer)) as process, connect(process.address) as channel:
        request = pb.StartValidationRequest(request_id="one")
        with pytest.raises(grpc.aio.AioRpcError, match="given up") as arrived:
            await ValidatorServiceStub(channel).StartValidation(request, timeout=60)
    assert arrived.value.code() == grpc.StatusCode.UNAVAILABLE
    assert handled("UNAVAILABLE") == before + 1


async def test_a_peer_that_is_away_is_waited_for_and_asked_again_with_the_same_request_id(tmp_path: Path) -> None:
    refusals = [UnavailableError("later"), UnavailableError("later")]

    async def refuse_twice(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        if refusals:
            raise refusals.pop()
        return await answer_seven(request)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    calling = asyncio.create_task(start_validation(address, timeout_seconds=30))
    servicer = Servicer(refuse_twice)
    async with running_service(tmp_path, serving(servicer), listen=address):
        assert (await calling).samples == 7
    assert servicer.request_ids == ["one"] * 3


async def test_a_peer_that_stays_away_is_waited_for_until_the_deadline_only() -> None:
    began = asyncio.get_running_loop().time()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and never listened on
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await start_validation(f"127.0.0.1:{taken.getsockname()[1]}", timeout_seconds=0.5)
    assert asyncio.get_running_loop().time() - began < 5


async def test_a_message_over_the_limit_is_a_typed_error_that_names_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = [(name, 1000 if value == MAX_MESSAGE_BYTES else value) for name, value in server.SERVER_OPTIONS]
    monkeypatch.setattr(server, "SERVER_OPTIONS", smaller)
    async with running_service(tmp_path, serving(Servicer())) as process, connect(process.address) as channel:
        request = pb.StartValidationRequest(request_id="x" * 1001)
        with pytest.raises(ResourceExhaustedError, match=r"larger than max \(\d+ vs\. 1000\)"):
            await call(ValidatorServiceStub(channel).StartValidation, request, timeout_seconds=10)


@pytest.mark.guide("C5", "D5")
async def test_health_is_serving_only_between_ready_and_drain(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path, serving(Servicer(), is_ready=False)) as process,
        connect(process.address) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        states = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
        assert (await states.read()).status == NOT_SERVING
        alive = await health.Check(health_pb2.HealthCheckRequest(service="alive"), timeout=20)
        assert alive.status == SERVING
        await process.set_ready()
        assert (await states.read()).status == SERVING
        process.stopping.set()
        assert (await states.read()).status == NOT_SERVING


@pytest.mark.parametrize("is_on", [True, False])
async def test_reflection_is_there_when_the_setting_is_on(tmp_path: Path, is_on: bool) -> None:
    async with (
        running_service(tmp_path, serving(Servicer()), reflection=is_on) as process,
        connect(process.address) as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # the stubs know no asyncio
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        if is_on:
            answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=10)]
            assert SERVICE in {service.name for service in answers[0].list_services_response.service}
        else:
            # CANCELLED: what gRPC sometimes makes of a stream that is refused while it is still being written.
            with pytest.raises(grpc.aio.AioRpcError, match=r"UNIMPLEMENTED|CANCELLED"):
                _ = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=10)]


async def test_background_work_that_fails_stops_the_process_with_its_error(tmp_path: Path) -> None:
    async def fail() -> None:
        raise InvalidArgumentError("the work failed")

    closed: list[str] = []

    async def start(process: ServiceProcess) -> None:
        async def close(name: str) -> None:
            closed.append(name)
            if name == "second":
                raise ZeroDivisionError

        process.on_close(lambda: close("first"))
        process.on_close(lambda: close("second"))
        process.spawn(fail())

    with pytest.raises(InvalidArgumentError, match="the work failed"):
        async with running_service(tmp_path, start) as process:
            await process.stopping.wait()
    assert closed == ["second", "first"]


async def test_a_call_in_flight_completes_while_the_process_drains(tmp_path: Path) -> None:
    entered, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        entered.set()
        await may_end.wait()
        return await answer_seven(request)

    async with running_service(tmp_path, serving(Servicer(wait))) as process:
        calling = asyncio.create_task(start_validation(process.address))
        await entered.wait()
        process.stopping.set()
        with pytest.raises((UnavailableError, DeadlineExceededError)):  # nothing new is taken
            await start_validation(process.address, timeout_seconds=0.3)
        may_end.set()
        assert (await calling).samples == 7


async def test_a_call_that_does_not_end_is_cut_off_when_the_drain_is_over(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def wait(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with running_service(tmp_path, serving(Servicer(wait)), drain_seconds=0.2) as process:
        calling = asyncio.create_task(start_validation(process.address, timeout_seconds=2))
        await entered.wait()
    with pytest.raises(NexrlError):
        await calling


async def test_metrics_are_served_over_http(tmp_path: Path) -> None:
    async with running_service(tmp_path, serving(Servicer())) as process:
        await start_validation(process.address)
        url = f"http://127.0.0.1:{process.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    labels = f'grpc_code="OK",grpc_method="StartValidation",grpc_service="{SERVICE}"'
    assert re.search(rf"grpc_server_handled_total{{{labels}}} [1-9]", text)
    assert "grpc_server_handling_seconds_bucket" in text


async def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPreconditionError, match=f"listen: cannot bind {address}"):
            async with running_service(tmp_path, serving(Servicer()), listen=address):
                raise AssertionError
        port = taken.getsockname()[1]
        with pytest.raises(FailedPreconditionError, match=f"metrics_port: cannot bind 127.0.0.1:{port}"):
            async with running_service(tmp_path, serving(Servicer()), metrics_port=port):
                raise AssertionError
        with pytest.raises(
            FailedPreconditionError, match=f"health_port: cannot bind 127.0.0.1:{port}.*NEXRL_HEALTH_PORT"
        ):
            async with running_service(tmp_path, serving(Servicer()), health_port=port):
                raise AssertionError


MAIN = """
import asyncio, sys
from nexrl.rpc.server import run_service
async def start(process):
    async def tell():
        await asyncio.sleep(0)
        print("ready", flush=True)
    await process.set_ready()
    process.spawn(tell())
run_service("test", start)
"""


def service_command(tmp_path: Path, **environment: str) -> dict[str, Any]:
    from nexrl.spec import dump_resolved

    (tmp_path / "experiment.yaml").write_text(dump_resolved(small_experiment()))
    known = {"NEXRL_EXPERIMENT_FILE": str(tmp_path / "experiment.yaml"), "NEXRL_RUN_DIR": str(tmp_path)}
    return {"args": [sys.executable, "-c", MAIN], "env": {**os.environ, **known, "NEXRL_INSTANCE": "t", **environment}}


async def test_a_call_may_wait_long_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings keep its connection; here of 1 s, the shortest that gRPC allows, with the server's limit below, as ours."""
    faster = [(name, 500 if "ping_interval" in name else value) for name, value in server.SERVER_OPTIONS]
    monkeypatch.setattr(server, "SERVER_OPTIONS", faster)

    async def take_six_seconds(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        await asyncio.sleep(6)  # five pings: with three too many the connection is closed
        return pb.StartValidationResponse(samples=7)

    options = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    async with (
        running_service(tmp_path, serving(Servicer(take_six_seconds))) as process,
        grpc.aio.insecure_channel(process.address, options=options) as channel,
    ):
        request = pb.StartValidationRequest(request_id="1")
        assert (await ValidatorServiceStub(channel).StartValidation(request, timeout=30)).samples == 7


def test_a_service_process_ends_well_on_sigterm(tmp_path: Path) -> None:
    with subprocess.Popen(
        **service_command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("environment", "code", "message"),
    [
        ({"NEXRL_LISTEN": "TAKEN"}, 4, "test: listen: cannot bind 127.0.0.1:"),
        ({"NEXRL_METRICS_PORT": "ninety"}, 2, "test: settings: NEXRL_METRICS_PORT: "),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line_and_in_its_exit_code(
    tmp_path: Path, environment: dict[str, str], code: int, message: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environment = {name: value.replace("TAKEN", address) for name, value in environment.items()}
        command = service_command(tmp_path, **environment)
        ended = subprocess.run(**command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout.count("\n")) == (code, 1), ended.stderr
    assert ended.stdout.startswith(message)
