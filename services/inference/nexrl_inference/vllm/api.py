"""Passes on vLLM's OpenAI-compatible API, and none of its routes that change weights."""

from aiohttp import web
from multidict import CIMultiDict

from nexrl.errors import UnavailableError
from nexrl.rpc.http import error_response
from nexrl_inference.replica import Replica
from nexrl_inference.vllm.server import VllmServer

PASSED_ON = (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"))
CONTENT_TYPE = "Content-Type"
CHUNK_BYTES = 2**16


def vllm_api(replica: Replica, server: VllmServer) -> web.Application:
    """Return an application with the routes of PASSED_ON, and `/health`: 200 while a version is served, else 503."""

    async def health(request: web.Request) -> web.Response:
        state = replica.state()
        return web.json_response({"policy_version": state.policy_version}, status=200 if state.ready else 503)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        if request.method == "POST" and not replica.state().ready:
            return error_response(UnavailableError("no policy version is served here yet"))
        headers = CIMultiDict({CONTENT_TYPE: request.headers.get(CONTENT_TYPE, "application/json")})
        try:
            async with server.open(request.method, request.path, data=await request.read(), headers=headers) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers={CONTENT_TYPE: answer.headers[CONTENT_TYPE]}
                )
                await response.prepare(request)
                async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                    await response.write(chunk)
                await response.write_eof()
                return response
        except UnavailableError as error:
            return error_response(error)

    application = web.Application(client_max_size=64 * 2**20)
    application.router.add_get("/health", health)
    for method, path in PASSED_ON:
        application.router.add_route(method, path, pass_on)
    return application
