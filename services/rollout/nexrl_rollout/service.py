"""nexrl.v1.GatewayService, over gRPC and over HTTP with JSON."""

import json
from typing import Any

import grpc
from aiohttp import web
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from nexrl.environment import Outcome, Status
from nexrl.errors import InvalidArgumentError
from nexrl.v1 import gateway_service_pb2 as pb
from nexrl.v1.gateway_service_pb2_grpc import GatewayServiceServicer
from nexrl.v1.trajectory_pb2 import (
    PURPOSE_TRAINING,
    PURPOSE_VALIDATION,
    VERDICT_ENV_ERROR,
    VERDICT_OK,
    VERDICT_REWARD_ERROR,
    VERDICT_TIMEOUT,
    VERDICT_TRUNCATED,
    Task,
    Verdict,
)
from nexrl_rollout.external import ExternalWorker, OpenEpisode
from nexrl_rollout.gateway import read_json

WAIT_SECONDS, MAX_WAIT_SECONDS = 20.0, 60.0
STATUS_OF: dict[Verdict.ValueType, Status] = {
    VERDICT_OK: "ok",
    VERDICT_TRUNCATED: "truncated",
    VERDICT_ENV_ERROR: "env_error",
    VERDICT_REWARD_ERROR: "reward_error",
    VERDICT_TIMEOUT: "timeout",
}
Context = grpc.aio.ServicerContext[Any, Any]


class GatewayServicer(GatewayServiceServicer):
    """nexrl.v1.GatewayService."""

    def __init__(self, worker: ExternalWorker) -> None:
        self._worker = worker

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        return await self.open(request)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        return self.close(request)

    def application(self) -> web.Application:
        """Returns the same two methods over HTTP."""
        app = web.Application()
        app.router.add_post("", self._post_session)
        app.router.add_post("/{session_id}/close", self._post_close)
        return app

    async def open(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """Answer OpenSession. Raises InvalidArgumentError."""
        if not request.request_id:
            raise InvalidArgumentError("request_id: must not be empty: use a UUID, the same when the call is repeated")
        if not 0 <= request.wait_seconds <= MAX_WAIT_SECONDS:
            allowed = f"0 to {MAX_WAIT_SECONDS:g}, 0 for {WAIT_SECONDS:g}"
            raise InvalidArgumentError(f"wait_seconds: {request.wait_seconds}; {allowed}")
        opened = await self._worker.open(request.request_id, request.wait_seconds or WAIT_SECONDS)
        return pb.OpenSessionResponse(session=_session(opened) if opened else None)

    def close(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Answer CloseSession. Raises InvalidArgumentError, and what `close_session` raises."""
        if request.verdict not in STATUS_OF:
            allowed = ", ".join(Verdict.Name(verdict) for verdict in STATUS_OF)
            raise InvalidArgumentError(f"verdict: {request.verdict}; must be one of {allowed}")
        try:
            outcome = Outcome(
                STATUS_OF[request.verdict],
                request.reward if request.HasField("reward") else None,
                dict(request.reward_components),
                request.error,
                list(request.turn_rewards),
            )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"verdict, reward: {error.message}") from error
        self._worker.close_session(request.session_id, outcome)
        return pb.CloseSessionResponse()

    async def _post_session(self, request: web.Request) -> web.Response:
        answer = MessageToDict(
            await self.open(_parsed(await read_json(request), pb.OpenSessionRequest())),
            preserving_proto_field_name=True,
        )
        if session := answer.get("session"):
            session["task"]["item"] = json.loads(session["task"].pop("item_json"))
        return web.json_response(answer)

    async def _post_close(self, request: web.Request) -> web.Response:
        closed = _parsed(await read_json(request), pb.CloseSessionRequest())
        closed.session_id = request.match_info["session_id"]
        self.close(closed)
        return web.json_response({})


def _parsed(body: object, message: Any) -> Any:
    if not isinstance(body, dict):
        raise InvalidArgumentError(f"the body is {type(body).__name__}; must be a JSON object")
    try:
        return ParseDict(body, message)
    except ParseError as error:
        raise InvalidArgumentError(f"the body: {error}") from error


def _session(opened: OpenEpisode) -> pb.AgentSession:
    episode = opened.episode
    return pb.AgentSession(
        session_id=episode.session.id,
        base_url=episode.endpoint.base_url,
        api_key=episode.endpoint.api_key,
        model=episode.endpoint.model,
        task=Task(task_id=episode.task.id, item_json=json.dumps(episode.task.item)),
        sample=episode.sample,
        purpose=PURPOSE_TRAINING if episode.task.purpose == "training" else PURPOSE_VALIDATION,
        temperature=episode.endpoint.temperature,
        max_new_tokens=episode.endpoint.max_new_tokens,
        deadline_unix_seconds=episode.deadline_unix_seconds,
    )
