"""A stand-in for the API server that reviews tokens, and tokens that it understands."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from nexrl.tls import CredentialFiles
from tests.support.certificates import Authority

OUR_TOKEN = "our-own-token"


def token(audience: str, account: str = "team:worker", *, is_good: bool = True) -> str:
    """Return a token in the form of a JSON Web Token. The stand-in does not check its signature."""
    claims = {"aud": [audience], "sub": f"system:serviceaccount:{account}", "good": is_good}
    header, payload = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "none"}, claims)
    )
    return f"{header}.{payload}.signature"


class TokenReviewer:
    """Answers TokenReviews as the API server does, and counts them. With a `status` other than 201, it refuses them."""

    def __init__(self) -> None:
        self.reviews = 0
        self.status = 201

    async def review(self, request: web.Request) -> web.Response:
        """Handle POST /apis/authentication.k8s.io/v1/tokenreviews."""
        assert request.headers["Authorization"] == f"Bearer {OUR_TOKEN}"
        self.reviews += 1
        spec = (await request.json())["spec"]
        payload = spec["token"].split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        status: dict[str, Any] = {"error": "the token was made up"}
        if claims["good"]:
            audiences = [audience for audience in spec["audiences"] if audience in claims["aud"]]
            status = {"authenticated": True, "audiences": audiences, "user": {"username": claims["sub"]}}
        return web.json_response({"kind": "TokenReview", "status": status}, status=self.status)


@asynccontextmanager
async def token_reviewer(folder: Path) -> AsyncIterator[tuple[TokenReviewer, str]]:
    """Run the stand-in. Yields it with its port on localhost. Writes a pod's ServiceAccount files to `folder`."""
    authority = Authority()
    tls = authority.write(folder, names=["localhost"])
    (folder / "token").write_text(OUR_TOKEN)
    reviewer = TokenReviewer()
    application = web.Application()
    application.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", reviewer.review)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "localhost", 0, ssl_context=CredentialFiles(tls).server_context()).start()
        yield reviewer, str(runner.addresses[0][1])
    finally:
        await runner.cleanup()
