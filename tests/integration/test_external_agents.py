"""rollout.type external: agents of other processes open sessions, and their episodes are put as any other sample."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import aiohttp
import httpx2
import openai
import pytest

from nexrl import agent_sessions
from nexrl.activity import ActivityTracker
from nexrl.agent_sessions import AgentSession, open_agent_sessions
from nexrl.environment import Outcome
from nexrl.errors import InvalidArgumentError, NotFoundError
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.rpc.server import ServiceProcess
from nexrl.v1 import gateway_service_pb2 as pb
from nexrl.v1.activity_service_pb2 import Module, Work
from nexrl.v1.gateway_service_pb2_grpc import GatewayServiceStub
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from nexrl.v1.trajectory_pb2 import (
    PURPOSE_TRAINING,
    PURPOSE_VALIDATION,
    VERDICT_ENV_ERROR,
    VERDICT_OK,
    VERDICT_TIMEOUT,
    VERDICT_TRUNCATED,
    SampleResult,
)
from nexrl_rollout.external import ExternalWorker
from nexrl_rollout.service import MAX_WAIT_SECONDS
from tests.support.certificates import OURS, Authority, environment
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.rollout import FakeEngine, FakePool, completion, task_lease
from tests.support.rollout_process import rollout_process
from tests.support.services import small_experiment

if TYPE_CHECKING:
    from nexrl.v1.gateway_service_pb2_grpc import GatewayServiceAsyncStub

EOS = 2


def replies(request: GenerateRequest, index: int) -> GeneratedCompletion:
    return completion([5, 6, EOS])


def external(pool: FakePool, folder: Path, **rollout: Any) -> Any:
    return rollout_process(pool, FakeEngine(replies), folder, type="external", chat=True, **rollout)


def results(pool: FakePool) -> list[SampleResult]:
    return [result for of_purpose in pool.results.values() for result in of_purpose]


async def ask(session: AgentSession, *messages: str) -> None:
    """Ask the policy once, with an unmodified client."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        said: Any = [{"role": "user", "content": message} for message in messages]
        await client.chat.completions.create(model=session.model, messages=said)


async def waiting_for(process: ServiceProcess) -> list[Work]:
    """Return what the process waits for, when it has started."""

    async def work() -> list[Work]:
        return list(process.activity.snapshot().work)

    return await eventually(work)


async def opened(
    process: ServiceProcess, wait_seconds: float = MAX_WAIT_SECONDS, request_id: str = ""
) -> pb.AgentSession:
    async with connect(process.address) as channel:
        stub: GatewayServiceAsyncStub = GatewayServiceStub(channel)
        request = pb.OpenSessionRequest(request_id=request_id or new_request_id(), wait_seconds=wait_seconds)
        return (await call(stub.OpenSession, request, timeout_seconds=2 * LIMIT_SECONDS)).session


async def close(process: ServiceProcess, session_id: str, **outcome: Any) -> None:
    async with connect(process.address) as channel:
        stub: GatewayServiceAsyncStub = GatewayServiceStub(channel)
        request = pb.CloseSessionRequest(session_id=session_id, **outcome)
        await call(stub.CloseSession, request, timeout_seconds=LIMIT_SECONDS)


@pytest.mark.guide("R3", "F3")
async def test_an_agent_elsewhere_is_trained_on_what_the_policy_said_to_it(tmp_path: Path) -> None:
    pool = FakePool([task_lease(0, 2, prompt="12"), task_lease(1, 1, purpose=PURPOSE_VALIDATION)])
    async with external(pool, tmp_path) as process, open_agent_sessions(process.address) as sessions:
        seen = []
        for reward in (1.0, 0.5, 0.25):
            async with sessions.session() as session:
                await ask(session, session.task["prompt"])
                session.score(reward, {"turns": 1.0})
                seen.append(session.is_training)
        await pool.wait_for(lambda: len(results(pool)) == 3)
    assert seen == [True, True, False]
    first, second = pool.results[PURPOSE_TRAINING]
    assert [result.verdict for result in (first, second)] == [VERDICT_OK] * 2
    (trajectory,) = first.trajectories
    assert trajectory.token_ids[-3:] == [5, 6, EOS]
    assert (trajectory.reward, dict(trajectory.reward_components)) == (1.0, {"turns": 1.0})
    assert [result.trajectories[0].reward for result in pool.results[PURPOSE_VALIDATION]] == [0.25]


async def test_no_sample_is_leased_that_no_agent_waits_for(tmp_path: Path) -> None:
    pool = FakePool([task_lease(0, 4)])
    async with external(pool, tmp_path) as process:
        (work,) = await waiting_for(process)
        assert work.waiting_on == "an agent that opens a session"
        assert not pool.lease_calls
        assert (await opened(process)).task.task_id == "train-0"
        assert pool.granted == ["0.0"]


async def test_sessions_are_opened_and_closed_over_http_too(tmp_path: Path) -> None:
    pool = FakePool([task_lease(0, 1, prompt="12")])
    async with external(pool, tmp_path) as process, aiohttp.ClientSession() as http:
        await waiting_for(process)
        url = f"http://127.0.0.1:{process.settings.http_port}"
        body = {"request_id": "mine", "wait_seconds": 20}
        async with http.post(f"{url}/sessions", json=body) as response:
            session = (await response.json())["session"]
        assert session["task"]["item"]["prompt"] == "12"
        chat = {"messages": [{"role": "user", "content": "12"}]}
        for named in ({"X-Session-ID": session["session_id"]}, {"Authorization": f"Bearer {session['api_key']}"}):
            async with http.post(f"{url}/v1/chat/completions", json=chat, headers=named) as response:
                assert response.status == 200, await response.text()
        wrong = {"verdict": "VERDICT_OK", "reward": 1, "turn_rewards": [1]}
        async with http.post(f"{url}/sessions/{session['session_id']}/close", json=wrong) as response:
            assert response.status == 400
            assert "turn_rewards: 1; must be one for each completion" in await response.text()
        right = {"verdict": "VERDICT_TRUNCATED", "reward": 1, "turn_rewards": [0.75, 0.25]}
        for _ in range(2):  # a repeated call changes nothing
            async with http.post(f"{url}/sessions/{session['session_id']}/close", json=right) as response:
                assert (response.status, await response.json()) == (200, {})
        await pool.wait_for(lambda: len(results(pool)) == 1)
        async with http.post(f"{url}/v1/chat/completions", json=chat, headers=named) as response:
            assert (response.status, "it was closed" in await response.text()) == (404, True)
    (result,) = results(pool)
    assert (result.verdict, len(result.trajectories)) == (VERDICT_TRUNCATED, 2)


async def test_an_agent_that_goes_while_it_waits_costs_no_attempt(tmp_path: Path) -> None:
    pool = FakePool()
    async with external(pool, tmp_path) as process:
        waiting = asyncio.create_task(opened(process))
        await pool.wait_for(lambda: pool.lease_calls == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not (await opened(process, 0.001)).session_id  # answered after the cancellation has arrived
        await pool.add(task_lease(0, 1))
        await pool.wait_for(lambda: bool(pool.returned))
    assert (pool.returned, results(pool)) == (["0.0"], [])


async def test_a_repeated_request_gets_its_session_again(tmp_path: Path) -> None:
    pool = FakePool([task_lease(0, 2)])
    async with external(pool, tmp_path) as process:
        first = await opened(process, request_id="mine")
        assert (await opened(process, request_id="mine")).session_id == first.session_id
        assert (await opened(process, request_id="other")).session_id != first.session_id


async def test_a_session_ends_at_its_time_limit_and_says_so(tmp_path: Path) -> None:
    pool = FakePool([task_lease(0, 1)])
    async with external(pool, tmp_path, timeoutSeconds=0.2) as process:
        session = AgentSession(await opened(process))
        await pool.wait_for(lambda: len(results(pool)) == 1)
        with pytest.raises(openai.NotFoundError, match="its time limit has passed, or its lease was lost"):
            await ask(session, "late")
        with pytest.raises(NotFoundError, match="session_id: its time limit has passed, or its lease was lost"):
            await close(process, session.session_id, verdict=VERDICT_OK, reward=1.0)
        with pytest.raises(NotFoundError, match="session_id: no such session"):
            await close(process, "guessed", verdict=VERDICT_OK, reward=1.0)
    assert results(pool)[0].verdict == VERDICT_TIMEOUT


async def test_what_an_agent_raises_or_leaves_out_fails_its_sample(tmp_path: Path) -> None:
    pool = FakePool([task_lease(0, 2)])
    async with external(pool, tmp_path) as process, open_agent_sessions(process.address) as sessions:
        with pytest.raises(KeyError):
            async with sessions.session():
                raise KeyError("tool")
        async with sessions.session() as session:
            await ask(session, "12")
        await pool.wait_for(lambda: len(results(pool)) == 2)
    first, second = results(pool)
    assert {first.verdict, second.verdict} == {VERDICT_ENV_ERROR}
    assert "KeyError" in first.error
    assert second.error == "the agent gave no score"


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ({"verdict": 99}, "verdict: 99; must be one of VERDICT_OK, VERDICT_TRUNCATED, VERDICT_ENV_ERROR"),
        ({"verdict": VERDICT_OK}, "ok and truncated require a reward"),
        ({"verdict": VERDICT_OK, "reward": float("nan")}, "must be finite"),
        ({"verdict": VERDICT_ENV_ERROR, "reward": 0.0}, "others have none"),
    ],
)
async def test_an_outcome_that_cannot_be_is_refused_and_the_session_stays_open(
    tmp_path: Path, outcome: dict[str, Any], message: str
) -> None:
    pool = FakePool([task_lease(0, 1)])
    async with external(pool, tmp_path) as process:
        session = AgentSession(await opened(process))
        with pytest.raises(InvalidArgumentError, match=message):
            await close(process, session.session_id, **outcome)
        await ask(session, "12")
        await close(process, session.session_id, verdict=VERDICT_OK, reward=1.0)
        await pool.wait_for(lambda: len(results(pool)) == 1)
    assert results(pool)[0].verdict == VERDICT_OK


async def test_the_sdk_asks_again_until_there_is_an_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_sessions, "WAIT_SECONDS", 0.01)
    pool = FakePool()
    async with external(pool, tmp_path) as process, open_agent_sessions(process.address) as sessions:
        waiting = sessions.session()
        entering = asyncio.create_task(waiting.__aenter__())
        await pool.wait_for(lambda: pool.lease_calls >= 1)
        await pool.add(task_lease(0, 1))
        session = await entering
        session.fail("enough")
        await waiting.__aexit__(None, None, None)
        await pool.wait_for(lambda: len(results(pool)) == 1)
    assert results(pool)[0].error == "enough"


async def test_with_tls_sessions_are_for_callers_with_credentials_and_requests_for_those_who_know_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    ours = authority.write(tmp_path / "ours")
    for name, value in environment(ours).items():
        monkeypatch.setenv(name, value)
    identified, stranger = (
        ssl.create_default_context(cafile=str(ours.ca)),
        ssl.create_default_context(cafile=str(ours.ca)),
    )
    identified.load_cert_chain(str(ours.certificate), ours.key)
    async with external(FakePool(), tmp_path) as process, aiohttp.ClientSession() as http:
        await eventually(lambda: is_listening(process))
        url = f"https://127.0.0.1:{process.settings.http_port}"
        statuses = []
        for path, context in (("/sessions", stranger), ("/sessions", identified), ("/v1/chat/completions", stranger)):
            async with http.post(f"{url}{path}", json={}, ssl=context, server_hostname=OURS) as response:
                statuses.append(response.status)
        async with httpx2.AsyncClient(verify=identified) as client:  # as openai's clients connect
            answer = await client.post(f"{url}/sessions", json={}, extensions={"sni_hostname": OURS})
            assert "request_id: must not be empty" in answer.text
        async with httpx2.AsyncClient(verify=identified) as client:
            with pytest.raises(httpx2.ConnectError, match="certificate"):
                await client.post(f"{url}/sessions", json={})
    assert statuses == [401, 400, 404]  # no credentials; no request_id; no session


async def is_listening(process: ServiceProcess) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", process.settings.http_port)
        writer.close()
        return True
    return False


async def test_an_episode_that_is_lost_is_not_closed_before_its_task_has_ended() -> None:
    worker, lost = ExternalWorker(Mock(), small_experiment(), ActivityTracker(Module(), None)), Mock()
    lost.result = asyncio.get_running_loop().create_future()
    lost.result.cancel()
    worker._open["lost"] = lost
    with pytest.raises(NotFoundError, match="its time limit has passed, or its lease was lost"):
        worker.close_session("lost", Outcome("ok", 1.0))
