"""Mutual TLS between real servers and clients: which callers are admitted, and how certificates are replaced."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nexrl.errors import InvalidArgumentError, PermissionDeniedError
from nexrl.local.components import free_ports
from nexrl.rpc.client import call, connect, watch
from nexrl.rpc.server import ServiceProcess
from nexrl.tls import OPERATOR, Tls, tls_from_environment
from nexrl.v1 import validator_service_pb2 as pb
from nexrl.v1 import weight_sync_service_pb2 as stream_pb
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub, add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub, add_WeightSyncServiceServicer_to_server
from nexrl_operator.authority import issue
from tests.support.certificates import OTHERS, OURS, Authority, environment, write
from tests.support.patience import LIMIT_SECONDS
from tests.support.rollout import Fake
from tests.support.services import running_service

Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(Fake):
    """Says 7; waits for `may_end` when asked to, as does its stream. `shown`: the certificate of the last caller."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.entered = asyncio.Event()
        self.shown = b""

    async def StartValidation(self, request: pb.StartValidationRequest, context: Context) -> pb.StartValidationResponse:
        self.shown = b"".join(context.auth_context()["x509_pem_cert"])
        self.entered.set()
        if request.request_id == "wait":
            await self.may_end.wait()
        return pb.StartValidationResponse(samples=7)

    async def WatchReplicas(self, request: stream_pb.WatchReplicasRequest, context: Context) -> Any:
        yield stream_pb.WatchReplicasResponse(committed_version=1)
        await self.may_end.wait()
        yield stream_pb.WatchReplicasResponse(committed_version=2)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def ours(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tls:
    """The experiment's certificate, which the environment names."""
    tls = authority.write(tmp_path / "ours")
    for name, value in environment(tls).items():
        monkeypatch.setenv(name, value)
    return tls


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


def serving(servicer: Fake) -> Callable[[ServiceProcess], Awaitable[None]]:
    async def start(process: ServiceProcess) -> None:
        process.add(add_ValidatorServiceServicer_to_server, servicer, "nexrl.v1.ValidatorService")
        process.add(add_WeightSyncServiceServicer_to_server, servicer, "nexrl.v1.WeightSyncService")
        await process.set_ready()

    return start


async def ask(channel: grpc.aio.Channel, request_id: str = "one", *, timeout_seconds: float = 10) -> int:
    request = pb.StartValidationRequest(request_id=request_id)
    method = ValidatorServiceStub(channel).StartValidation
    return (await call(method, request, timeout_seconds=timeout_seconds)).samples


async def refuses(channel: grpc.aio.Channel, why: str | None = None) -> None:
    """The connection does not come about."""
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError, match=why) as refusal:
            await ask_once(channel)
    assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_processes_of_one_experiment_reach_each_other_at_any_address(ours: Tls, tmp_path: Path) -> None:
    async with running_service(tmp_path, serving(Servicer())) as process:
        for address in (process.address, f"ipv4:{process.address}", f"dns:///localhost:{process.port}"):
            async with connect(address) as channel:
                await channel.channel_ready()
                assert await ask(channel) == 7


@pytest.mark.parametrize("name", [OPERATOR, "*.team.experiment.nexrl.dev"])
async def test_the_operator_and_who_is_the_whole_namespace_are_let_in(
    ours: Tls, authority: Authority, tmp_path: Path, name: str
) -> None:
    shown = authority.write(tmp_path / "shown", name)
    to_us = Tls(shown.ca, OURS, shown.certificate, shown.key)
    async with running_service(tmp_path, serving(Servicer())) as process, connect(process.address, to_us) as channel:
        assert await ask(channel) == 7


async def test_one_certificate_may_serve_all_experiments_of_a_namespace(
    ours: Tls, authority: Authority, tmp_path: Path
) -> None:
    authority.write(tmp_path / "ours", "*.team.experiment.nexrl.dev")
    async with running_service(tmp_path, serving(Servicer())) as process, connect(process.address) as channel:
        assert await ask(channel) == 7


@pytest.mark.parametrize(
    "name", ["*.elsewhere.experiment.nexrl.dev", "*.experiment.nexrl.dev", "team.experiment.nexrl.dev"]
)
async def test_a_name_that_only_looks_alike_is_refused(
    ours: Tls, authority: Authority, tmp_path: Path, name: str
) -> None:
    shown = authority.write(tmp_path / "shown", name)
    to_us = Tls(shown.ca, OURS, shown.certificate, shown.key)
    async with running_service(tmp_path, serving(Servicer())) as process, connect(process.address, to_us) as channel:
        with pytest.raises(PermissionDeniedError):
            await ask(channel)


async def test_another_experiment_is_refused_in_calls_and_streams(
    ours: Tls, authority: Authority, tmp_path: Path
) -> None:
    others = authority.write(tmp_path / "others", OTHERS)
    to_us = Tls(others.ca, OURS, others.certificate, others.key)
    async with running_service(tmp_path, serving(Servicer())) as process, connect(process.address, to_us) as channel:
        with pytest.raises(PermissionDeniedError, match=f"{OTHERS}; this server is {OURS}"):
            await ask(channel)
        with pytest.raises(PermissionDeniedError):
            await anext(watch(WeightSyncServiceStub(channel).WatchReplicas, stream_pb.WatchReplicasRequest()))


async def test_a_server_of_another_experiment_is_not_spoken_to(ours: Tls, authority: Authority, tmp_path: Path) -> None:
    others = authority.write(tmp_path / "others", OTHERS)
    async with running_service(tmp_path, serving(servicer := Servicer())) as process:
        await refuses(connect(process.address, others), "Hostname Verification Check failed")
    assert not servicer.entered.is_set()


async def test_certificates_of_another_authority_or_that_have_expired_are_refused(
    ours: Tls, authority: Authority, tmp_path: Path
) -> None:
    stranger = write(tmp_path / "stranger", authority.ca, issue(Authority().ca, [], OURS))
    expired = authority.write(tmp_path / "expired", days=-0.001)
    async with running_service(tmp_path, serving(servicer := Servicer())) as process:
        for tls in (stranger, expired):
            await refuses(connect(process.address, tls))
    assert not servicer.entered.is_set()


async def test_a_server_of_another_authority_or_whose_certificate_has_expired_is_not_spoken_to(
    ours: Tls, authority: Authority, tmp_path: Path
) -> None:
    trusting_others = write(tmp_path / "stranger", Authority().ca, issue(authority.ca, [], OURS))
    async with running_service(tmp_path, serving(servicer := Servicer())) as process:
        await refuses(connect(process.address, trusting_others), "CERTIFICATE_VERIFY_FAILED")
        mine = authority.write(tmp_path / "mine")
        authority.write(tmp_path / "ours", days=-0.001)
        await refuses(connect(process.address, mine), "CERTIFICATE_VERIFY_FAILED")
    assert not servicer.entered.is_set()


async def test_a_client_without_a_certificate_or_without_tls_does_not_get_through(ours: Tls, tmp_path: Path) -> None:
    trusted = grpc.ssl_channel_credentials(ours.ca.read_bytes())
    name = [("grpc.ssl_target_name_override", OURS)]
    async with running_service(tmp_path, serving(servicer := Servicer())) as process:
        await refuses(grpc.aio.secure_channel(process.address, trusted, options=name))
        await refuses(grpc.aio.insecure_channel(process.address))
    assert not servicer.entered.is_set()


async def test_certificates_are_renewed_under_calls_and_none_fails(
    ours: Tls, authority: Authority, tmp_path: Path
) -> None:
    """Twenty renewals, the last by another authority, which the files know beside the first."""
    successor = Authority()
    async with (
        running_service(tmp_path, serving(servicer := Servicer())) as process,
        connect(process.address) as channel,
    ):
        waiting = asyncio.create_task(ask(channel, "wait", timeout_seconds=LIMIT_SECONDS))
        watch: Any = WeightSyncServiceStub(channel).WatchReplicas
        stream = watch(stream_pb.WatchReplicasRequest(), timeout=LIMIT_SECONDS)
        assert (await stream.read()).committed_version == 1
        await servicer.entered.wait()
        for _ in range(20):
            authority.write(tmp_path / "ours")
            answers = await asyncio.gather(*(ask_once(channel) for _ in range(5)))
            assert answers == [7] * 5
        both = successor.ca.certificate + authority.ca.certificate
        for ca, issuer in ((both, authority), (both, successor), (successor.ca.certificate, successor)):
            issued = issue(issuer.ca, [], OURS)
            write(tmp_path / "ours", type(issued)(ca, b""), issued)
            assert await ask_once(channel) == 7
        servicer.may_end.set()
        assert await waiting == 7
        assert (await stream.read()).committed_version == 2


async def ask_once(channel: grpc.aio.Channel) -> int:
    """Without the repetitions of `call`, which could hide a failure."""
    request = pb.StartValidationRequest(request_id="one")
    return (await ValidatorServiceStub(channel).StartValidation(request, timeout=LIMIT_SECONDS)).samples


async def test_a_channel_shows_its_new_certificate_from_the_next_call_on(
    ours: Tls, authority: Authority, tmp_path: Path
) -> None:
    mine = authority.write(tmp_path / "mine")
    assert mine.certificate
    async with (
        running_service(tmp_path, serving(servicer := Servicer())) as process,
        connect(process.address, mine) as channel,
    ):
        for _ in range(3):
            authority.write(tmp_path / "mine")
            assert await ask_once(channel) == 7
            assert servicer.shown == mine.certificate.read_bytes()


async def test_a_running_server_shows_its_new_certificate(ours: Tls, authority: Authority, tmp_path: Path) -> None:
    successor = Authority()
    async with running_service(tmp_path, serving(Servicer())) as process:
        new = successor.write(tmp_path / "ours")
        async with connect(process.address, new) as channel:
            assert await ask(channel) == 7
        await refuses(connect(process.address, authority.write(tmp_path / "old")), "CERTIFICATE_VERIFY_FAILED")


@pytest.mark.parametrize("file", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("content", [b"not a certificate", None], ids=["broken", "missing"])
async def test_files_that_are_no_good_change_nothing_until_they_are(
    ours: Tls, authority: Authority, tmp_path: Path, file: str, content: bytes | None
) -> None:
    async with running_service(tmp_path, serving(Servicer())) as process, connect(process.address) as before:
        assert await ask_once(before) == 7
        path = tmp_path / "ours" / file
        path.unlink() if content is None else path.write_bytes(content)
        async with connect(process.address, authority.write(tmp_path / "mine")) as another:
            assert await ask_once(before) == 7
            assert await ask_once(another) == 7
            authority.write(tmp_path / "ours")
            assert await ask_once(before) == 7


async def test_files_that_are_no_good_at_first_are_one_clear_error(ours: Tls, tmp_path: Path) -> None:
    (tmp_path / "ours" / "tls.key").write_bytes((tmp_path / "ours" / "tls.crt").read_bytes())
    with pytest.raises(InvalidArgumentError, match=r"TLS: .*tls\.crt, .*tls\.key: .*PEM"):
        connect("localhost:1")
    with pytest.raises(InvalidArgumentError, match="TLS: "):
        async with running_service(tmp_path, serving(Servicer())):
            raise AssertionError


@pytest.mark.parametrize("missing", ["NEXRL_TLS_CERT", "NEXRL_TLS_KEY", "NEXRL_TLS_CA", "NEXRL_TLS_NAME"])
def test_a_setting_that_is_missing_is_named(missing: str) -> None:
    tls = Tls(Path("ca"), OURS, Path("cert"), Path("key"))
    assert tls_from_environment(environment(tls)) == tls
    assert tls_from_environment({}) is None
    with pytest.raises(InvalidArgumentError, match=f"{missing}: missing"):
        tls_from_environment({name: value for name, value in environment(tls).items() if name != missing})


async def test_a_probe_needs_no_certificate_and_gets_health_only(ours: Tls, tmp_path: Path, free_port: int) -> None:
    async with (
        running_service(tmp_path, serving(Servicer()), health_port=free_port),
        grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as probe,
    ):
        health: Any = health_pb2_grpc.HealthStub(probe)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_SECONDS, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await health.Check(health_pb2.HealthCheckRequest(service="x" * 4096), timeout=LIMIT_SECONDS)
        request = pb.StartValidationRequest(request_id="1")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await ValidatorServiceStub(probe).StartValidation(request, timeout=LIMIT_SECONDS)
        assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_tokens_are_not_taken_without_tls(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="NEXRL_TOKEN_PORT: tokens require TLS"):
        async with running_service(tmp_path, serving(Servicer()), token_port=1):
            raise AssertionError


async def test_a_process_tells_others_the_host_that_its_settings_say(tmp_path: Path) -> None:
    async with running_service(tmp_path, serving(Servicer()), listen="0.0.0.0:0", advertise="10.1.2.3") as process:
        assert process.address == f"10.1.2.3:{process.port}"
        async with connect(f"127.0.0.1:{process.port}") as channel:
            await channel.channel_ready()
