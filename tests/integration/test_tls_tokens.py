"""Clients that show a ServiceAccount's token instead of a certificate: a rollout service of one's own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nexrl.errors import FailedPreconditionError, PermissionDeniedError, UnauthenticatedError
from nexrl.local.components import free_ports
from nexrl.policy import Policy, Sampling
from nexrl.rpc import admission
from nexrl.rpc.client import call, connect
from nexrl.rpc.server import ServiceProcess
from nexrl.tls import Tls
from nexrl.v1 import inference_service_pb2 as inference
from nexrl.v1 import validator_service_pb2 as pb
from nexrl.v1 import weight_sync_service_pb2 as weight_sync
from nexrl.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from nexrl.v1.policy_pb2 import Replica
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub, add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import add_WeightSyncServiceServicer_to_server
from tests.support.certificates import OTHERS, OURS, Authority, environment
from tests.support.counting_proxy import counting_proxy
from tests.support.kubernetes_api import TokenReviewer, token, token_reviewer
from tests.support.patience import LIMIT_SECONDS
from tests.support.rollout import Fake
from tests.support.services import running_service

SERVICE = "nexrl.v1.ValidatorService"
WAITING = 20
MEBIBYTES = 10
Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(Fake):
    """A pool, a weight sync and a replica, as far as these tests ask them."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.replica = replica

    async def StartValidation(self, request: pb.StartValidationRequest, context: Context) -> pb.StartValidationResponse:
        return pb.StartValidationResponse(samples=7)

    async def WatchReplicas(self, request: weight_sync.WatchReplicasRequest, context: Context) -> Any:
        yield weight_sync.WatchReplicasResponse(replicas=[self.replica])
        await asyncio.Event().wait()

    async def Generate(self, request: inference.GenerateRequest, context: Context) -> inference.GenerateResponse:
        completion = inference.GeneratedCompletion(
            token_ids=[1], logprobs=[-0.5], policy_versions=[0], finish_reason="stop"
        )
        return inference.GenerateResponse(completions=[completion])


async def start(process: ServiceProcess) -> None:
    replica = Replica(replica_id="r", ready=True, address=process.address, token_address=process.token_address)
    servicer = Servicer(replica)
    process.add(add_ValidatorServiceServicer_to_server, servicer, "nexrl.v1.ValidatorService")
    process.add(add_WeightSyncServiceServicer_to_server, servicer, "nexrl.v1.WeightSyncService")
    process.add(add_InferenceServiceServicer_to_server, servicer, "nexrl.v1.InferenceService")
    await process.set_ready()


@pytest.fixture
async def reviewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TokenReviewer]:
    """This process as a pod with a certificate of the experiment, in a cluster that reviews tokens."""
    async with token_reviewer(tmp_path / "account") as (reviewer, port):
        monkeypatch.setattr(admission, "ACCOUNT", tmp_path / "account")
        variables = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": port}
        for name, value in (variables | environment(Authority().write(tmp_path / "ours"))).items():
            monkeypatch.setenv(name, value)
        yield reviewer


@pytest.fixture
async def process(reviewer: TokenReviewer, tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """A service that takes tokens."""
    async with running_service(tmp_path, start, token_port=free_ports(1)[0]) as process:
        yield process


@pytest.fixture
def show(tmp_path: Path) -> Callable[[str], Tls]:
    """Puts a token where a pod finds its projected one."""

    def write(content: str) -> Tls:
        (tmp_path / "token").write_text(f"{content}\n")
        return Tls(tmp_path / "ours/ca.crt", OURS, token=tmp_path / "token")

    return write


async def ask(channel: grpc.aio.Channel) -> int:
    request = pb.StartValidationRequest(request_id="one")
    method = ValidatorServiceStub(channel).StartValidation
    return (await call(method, request, timeout_seconds=LIMIT_SECONDS)).samples


async def test_a_token_for_the_experiment_is_let_in_and_asked_about_once(
    process: ServiceProcess, reviewer: TokenReviewer, show: Callable[[str], Tls]
) -> None:
    async with connect(process.token_address, show(token(OURS))) as channel:
        assert await asyncio.gather(*(ask(channel) for _ in range(20))) == [7] * 20
        assert reviewer.reviews == 1
        show(token(OURS, "team:renewed"))  # kubelet renews it; the same channel shows the new one
        assert await ask(channel) == 7
        assert reviewer.reviews == 2


@pytest.mark.parametrize(
    ("shown", "error", "why"),
    [
        (token(OTHERS), PermissionDeniedError, f"the token is for {OTHERS}; this server is {OURS}"),
        (token("https://kubernetes.default.svc"), PermissionDeniedError, "the token is for https"),
        (
            token(OURS, "elsewhere:worker"),
            PermissionDeniedError,
            "elsewhere:worker; required: system:serviceaccount:team:",
        ),
        (token(OURS, is_good=False), UnauthenticatedError, "the token was made up"),
        ("a-password", UnauthenticatedError, "not a ServiceAccount token"),
        ("a.b.c", UnauthenticatedError, "not a ServiceAccount token"),
    ],
    ids=["other experiment", "no experiment", "other namespace", "made up", "no token", "no JSON"],
)
async def test_a_token_that_is_not_for_the_experiment_is_refused(
    process: ServiceProcess, show: Callable[[str], Tls], shown: str, error: type[Exception], why: str
) -> None:
    async with connect(process.token_address, show(shown)) as channel:
        for _ in range(2):
            with pytest.raises(error, match=why):
                await ask(channel)


async def test_a_client_with_neither_certificate_nor_token_is_told_so(process: ServiceProcess, tmp_path: Path) -> None:
    trusted = grpc.ssl_channel_credentials((tmp_path / "ours/ca.crt").read_bytes())
    options = [("grpc.ssl_target_name_override", OURS)]
    async with grpc.aio.secure_channel(process.token_address, trusted, options=options) as channel:
        with pytest.raises(UnauthenticatedError, match="no client certificate, and no bearer token"):
            await ask(channel)


async def test_a_client_with_a_certificate_has_a_port_of_its_own(process: ServiceProcess) -> None:
    async with connect(process.address) as channel, connect(process.token_address) as wrong:
        assert await ask(channel) == 7
        with pytest.raises(UnauthenticatedError):  # this port asks for no certificate
            await ask(wrong)


async def test_a_token_that_cannot_be_judged_now_is_tried_again(
    process: ServiceProcess, reviewer: TokenReviewer, show: Callable[[str], Tls]
) -> None:
    reviewer.status = 503
    async with connect(process.token_address, show(token(OURS))) as channel:
        request = pb.StartValidationRequest(request_id="one")
        with pytest.raises(grpc.aio.AioRpcError, match=r"the token cannot be reviewed: .*503") as refusal:
            await ValidatorServiceStub(channel).StartValidation(request, timeout=LIMIT_SECONDS)  # `call` would retry
        assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        reviewer.status = 201
        assert await ask(channel) == 7


async def test_a_token_is_asked_about_again_after_a_while(
    process: ServiceProcess, reviewer: TokenReviewer, show: Callable[[str], Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REMEMBERED_SECONDS", 0.0)
    async with connect(process.token_address, show(token(OURS))) as channel:
        assert [await ask(channel), await ask(channel)] == [7, 7]
    assert reviewer.reviews == 2


async def test_calls_that_wait_for_the_review_of_their_token_may_not_send_their_messages(
    process: ServiceProcess, show: Callable[[str], Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def review(*_: object) -> dict[str, str]:
        may_end.wait(60)
        return {"error": "made up"}

    monkeypatch.setattr(admission.KubernetesApi, "review", review)
    monkeypatch.setattr(admission, "MAX_WAITING", WAITING)
    async with counting_proxy(process.token_address) as proxy, connect(proxy.address, show(token(OURS))) as channel:
        method: Any = channel.unary_unary(f"/{SERVICE}/StartValidation")
        calls = [method(bytes(MEBIBYTES * 2**20), timeout=LIMIT_SECONDS) for _ in range(WAITING)]
        await proxy.until_silent()
        with pytest.raises(grpc.aio.AioRpcError, match=f"{WAITING} calls wait for a review") as refusal:
            await method(b"", timeout=LIMIT_SECONDS)
        assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        assert proxy.sent_bytes < WAITING * 2**17
        may_end.set()
        assert {await waiting.code() for waiting in calls} == {grpc.StatusCode.UNAUTHENTICATED}


async def test_health_is_for_callers_who_are_admitted(process: ServiceProcess, tmp_path: Path) -> None:
    trusted = grpc.ssl_channel_credentials((tmp_path / "ours/ca.crt").read_bytes())
    options = [("grpc.ssl_target_name_override", OURS)]
    async with grpc.aio.secure_channel(process.token_address, trusted, options=options) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="no client certificate, and no bearer token"):
            await health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_SECONDS)


async def test_the_policy_asks_replicas_where_tokens_are_taken(
    process: ServiceProcess, show: Callable[[str], Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NEXRL_TLS_CERT", "NEXRL_TLS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NEXRL_TOKEN_FILE", str(show(token(OURS)).token))
    async with connect(process.token_address) as channel:
        policy = Policy(channel)
        following = asyncio.create_task(policy.follow_replicas())
        (completion,) = await policy.generate([1, 2], 1, Sampling(max_new_tokens=1), timeout_seconds=LIMIT_SECONDS)
        following.cancel()
        await policy.close()
    assert completion.finish_reason == "stop"


async def test_outside_a_cluster_tokens_are_not_offered(
    reviewer: TokenReviewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(FailedPreconditionError, match="unset NEXRL_TOKEN_PORT"):
        async with running_service(tmp_path, start, token_port=1):
            raise AssertionError
