"""The process of a service: health, reflection, drain, background work, metrics, ports, exit codes."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
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
    UnavailableError,
)
from nexrl.json_logging import last_words
from nexrl.log_files import log_path
from nexrl.rpc.client import connect
from nexrl.rpc.server import ServiceProcess
from nexrl.spec import dump_resolved
from nexrl.v1 import validator_service_pb2 as pb
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.services import running_service, small_experiment
from tests.support.validator import SERVICE, ValidatorServicer, answer_seven, serving, start_validation

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.guide("C5", "D5")
async def test_health_is_serving_only_between_ready_and_drain(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path, serving(ValidatorServicer(), is_ready=False)) as process,
        connect(process.address) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        states = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=LIMIT_SECONDS)
        assert (await states.read()).status == NOT_SERVING
        alive = await health.Check(health_pb2.HealthCheckRequest(service="alive"), timeout=LIMIT_SECONDS)
        assert alive.status == SERVING
        await process.set_ready()
        assert (await states.read()).status == SERVING
        process.stopping.set()
        assert (await states.read()).status == NOT_SERVING


@pytest.mark.parametrize("is_on", [True, False])
async def test_reflection_is_there_when_the_setting_is_on(tmp_path: Path, is_on: bool) -> None:
    async with (
        running_service(tmp_path, serving(ValidatorServicer()), reflection=is_on) as process,
        connect(process.address) as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # the stubs know no asyncio
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        if is_on:
            answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=LIMIT_SECONDS)]
            assert SERVICE in {service.name for service in answers[0].list_services_response.service}
        else:
            # CANCELLED: what gRPC sometimes makes of a stream that is refused while it is still being written.
            with pytest.raises(grpc.aio.AioRpcError, match=r"UNIMPLEMENTED|CANCELLED"):
                _ = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=LIMIT_SECONDS)]


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


async def test_a_process_that_still_starts_stops_when_it_is_told_to(tmp_path: Path) -> None:
    async def start(process: ServiceProcess) -> None:
        process.stopping.set()
        await asyncio.Event().wait()

    async with running_service(tmp_path, start) as process:
        await process.stopping.wait()


async def test_a_call_in_flight_completes_while_the_process_drains(tmp_path: Path) -> None:
    entered, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        entered.set()
        await may_end.wait()
        return await answer_seven(request)

    servicer = ValidatorServicer(wait)
    async with running_service(tmp_path, serving(servicer)) as process:
        calling = asyncio.create_task(start_validation(process.address))
        await entered.wait()
        process.stopping.set()
        with pytest.raises((UnavailableError, DeadlineExceededError)):  # nothing new is taken
            await start_validation(process.address, timeout_seconds=0.3)
        assert servicer.request_ids == ["one"]  # that of the call in flight
        may_end.set()
        assert (await calling).samples == 7


async def test_a_call_that_does_not_end_is_cut_off_when_the_drain_is_over(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def wait(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        running_service(tmp_path, serving(ValidatorServicer(wait)), drain_seconds=0.2) as process,
        connect(process.address) as channel,
    ):
        request = pb.StartValidationRequest(request_id="one")
        calling = asyncio.ensure_future(ValidatorServiceStub(channel).StartValidation(request, timeout=LIMIT_SECONDS))
        await finished(entered.wait(), "the call has arrived")
        process.stopping.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await finished(calling, "the call is cut off, long before its deadline")


async def test_metrics_are_served_over_http(tmp_path: Path) -> None:
    async with running_service(tmp_path, serving(ValidatorServicer())) as process:
        await start_validation(process.address)
        url = f"http://127.0.0.1:{process.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=LIMIT_SECONDS).read().decode())
    labels = f'grpc_code="OK",grpc_method="StartValidation",grpc_service="{SERVICE}"'
    assert re.search(rf"grpc_server_handled_total{{{labels}}} [1-9]", text)
    assert "grpc_server_handling_seconds_bucket" in text


async def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPreconditionError, match=f"listen: cannot bind {address}"):
            async with running_service(tmp_path, serving(ValidatorServicer()), listen=address):
                raise AssertionError
        port = taken.getsockname()[1]
        with pytest.raises(FailedPreconditionError, match=f"metrics_port: cannot bind 127.0.0.1:{port}"):
            async with running_service(tmp_path, serving(ValidatorServicer()), metrics_port=port):
                raise AssertionError
        with pytest.raises(
            FailedPreconditionError, match=f"health_port: cannot bind 127.0.0.1:{port}.*NEXRL_HEALTH_PORT"
        ):
            async with running_service(tmp_path, serving(ValidatorServicer()), health_port=port):
                raise AssertionError


MAIN = """
import asyncio, sys, time
from nexrl.rpc.server import run_service
async def start(process):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)  # a reward that does not return
    async def tell():
        await asyncio.sleep(0)
        print("ready", flush=True)
    await process.set_ready()
    process.spawn(tell())
run_service("test", start)
"""


FAILING = """
import asyncio
from nexrl.errors import FailedPreconditionError
from nexrl.rpc.server import run_service
async def fail():
    raise {error}
async def work():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
async def start(process):
    process.spawn(work())
    await process.set_ready()
run_service("test", start)
"""


def service_command(tmp_path: Path, main: str = MAIN, **environment: str) -> dict[str, Any]:
    from nexrl.spec import dump_resolved

    (tmp_path / "experiment.yaml").write_text(dump_resolved(small_experiment()))
    known = {"NEXRL_EXPERIMENT_FILE": str(tmp_path / "experiment.yaml"), "NEXRL_RUN_DIR": str(tmp_path)}
    return {"args": [sys.executable, "-c", main], "env": {**os.environ, **known, "NEXRL_INSTANCE": "t", **environment}}


def test_a_service_process_ends_well_on_sigterm(tmp_path: Path) -> None:
    with subprocess.Popen(
        **service_command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=LIMIT_SECONDS) == 0
        finally:
            process.kill()


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
        ended = subprocess.run(**command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert (ended.returncode, ended.stdout.count("\n")) == (code, 1), ended.stderr
    assert ended.stdout.startswith(message)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        ("FailedPreconditionError('no turn')", FailedPreconditionError.exit_code, "no turn"),
        ("KeyError('turn')", 1, "crashed: KeyError: 'turn'"),
    ],
)
def test_the_error_that_ended_a_group_of_tasks_is_the_reason(
    tmp_path: Path, error: str, code: int, reason: str
) -> None:
    command = service_command(tmp_path, FAILING.format(error=error))
    ended = subprocess.run(**command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert (ended.returncode, last_words(ended.stderr.splitlines())) == (code, reason)


def test_a_process_keeps_its_log_in_the_folder_of_the_run_if_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(dump_resolved(small_experiment()))
    settings = {
        "NEXRL_EXPERIMENT_FILE": str(tmp_path / "experiment.yaml"),
        "NEXRL_RUN_DIR": str(tmp_path),
        "NEXRL_INSTANCE": "controller",
        "NEXRL_KEEPS_LOG": "true",
        "NEXRL_LISTEN": "nowhere.invalid:0",
    }
    command = [sys.executable, "-m", "nexrl.cli", "serve", "controller"]
    ended = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert ended.returncode
    kept = log_path(tmp_path, "controller").read_text()
    assert "NEXRL_" in kept
    assert kept.splitlines()[0] in ended.stderr
