"""Python SDK for agents that run in processes of their own (`rollout.type: external`). Its only dependency is gRPC.

async with open_agent_sessions("rollout:50051") as sessions:
    while True:
        async with sessions.session() as session:
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
                ...  # the episode: any requests to session.model about session.task["prompt"]
            session.score(1.0)

The loop ends with UnavailableError when the run has ended.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from nexrl.exception_text import exception_text
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.v1 import gateway_service_pb2 as pb
from nexrl.v1.gateway_service_pb2_grpc import GatewayServiceStub
from nexrl.v1.trajectory_pb2 import PURPOSE_TRAINING, VERDICT_ENV_ERROR, VERDICT_OK, VERDICT_TRUNCATED

WAIT_SECONDS = 20.0
CALL_SECONDS = 60.0


class AgentSession:
    """One episode. Its requests go to `base_url` with `api_key`, and `score` says how it ended."""

    def __init__(self, opened: pb.AgentSession) -> None:
        self.session_id: str = opened.session_id
        self.base_url: str = opened.base_url
        self.api_key: str = opened.api_key
        self.model: str = opened.model
        self.task: Mapping[str, Any] = json.loads(opened.task.item_json)
        """The item: `id`, `prompt`, `answer`, `metadata`, and more keys if it has them."""
        self.is_training: bool = opened.purpose == PURPOSE_TRAINING
        self.temperature: float = opened.temperature
        self.max_new_tokens: int = opened.max_new_tokens
        self.deadline_unix_seconds: float = opened.deadline_unix_seconds
        self.outcome = pb.CloseSessionRequest(
            session_id=opened.session_id, verdict=VERDICT_ENV_ERROR, error="the agent gave no score"
        )

    def score(
        self,
        reward: float,
        components: Mapping[str, float] | None = None,
        *,
        turn_rewards: Sequence[float] = (),
        truncated: bool = False,
    ) -> None:
        """Set the reward of the episode. All numbers must be finite. `truncated`: a limit ended it."""
        self.outcome = pb.CloseSessionRequest(
            session_id=self.session_id,
            verdict=VERDICT_TRUNCATED if truncated else VERDICT_OK,
            reward=reward,
            reward_components=components or {},
            turn_rewards=turn_rewards,
        )

    def fail(self, error: str) -> None:
        """Say that the episode cannot be scored: the sample is attempted again."""
        self.outcome = pb.CloseSessionRequest(session_id=self.session_id, verdict=VERDICT_ENV_ERROR, error=error)


class AgentSessions:
    """Opens sessions at one gateway. While it is unavailable, a call is retried for CALL_SECONDS."""

    def __init__(self, gateway: grpc.aio.Channel) -> None:
        self._gateway = GatewayServiceStub(gateway)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AgentSession]:
        """Wait for an episode, and close it after the block. An exception that leaves the block fails the sample.

        Raises UnavailableError when the gateway has gone, InvalidArgumentError for a score that is refused,
        NotFoundError if the session has ended before, for example at its deadline.
        """
        session = AgentSession(await self._open())
        try:
            yield session
        except Exception as error:
            session.fail(exception_text(error))
            raise
        finally:
            await call(self._gateway.CloseSession, session.outcome, timeout_seconds=CALL_SECONDS)

    async def _open(self) -> pb.AgentSession:
        while True:
            request = pb.OpenSessionRequest(request_id=new_request_id(), wait_seconds=WAIT_SECONDS)
            answer = await call(self._gateway.OpenSession, request, timeout_seconds=WAIT_SECONDS + CALL_SECONDS)
            if answer.HasField("session"):
                session: pb.AgentSession = answer.session
                return session


@asynccontextmanager
async def open_agent_sessions(address: str) -> AsyncIterator[AgentSessions]:
    """Open a client of a gateway, host:port."""
    async with connect(address) as channel:
        yield AgentSessions(channel)
