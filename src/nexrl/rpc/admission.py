"""Who may call: a certificate of the experiment or of the operator, or a ServiceAccount's token for the experiment."""

import asyncio
import base64
import hashlib
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexrl.errors import FailedPreconditionError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from nexrl.tls import OPERATOR, Tls, namespace_of

REVIEW_SECONDS = 10.0
REMEMBERED_SECONDS = 60.0
"""For so long a token is not asked about again: one that is revoked is good for at most this long."""
MAX_REMEMBERED = 1000

BEARER = "Bearer "
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Admission:
    """The rule of one process. Without `reviews` no token is good."""

    def __init__(self, tls: Tls, reviews: "TokenReviews | None" = None) -> None:
        self._name = tls.name
        self._welcome = {tls.name, f"*.{tls.name.partition('.')[2]}", OPERATOR}
        self._reviews = reviews

    async def admit(self, certificate_names: Iterable[str], authorization: str) -> None:
        """Return when the caller may call; `certificate_names` are those of its verified certificate, if it has one.

        Raises UnauthenticatedError, PermissionDeniedError; UnavailableError when a token cannot be judged now.
        """
        if names := set(certificate_names):
            if not names & self._welcome:
                raise PermissionDeniedError(f"the certificate is for {', '.join(sorted(names))}; this is {self._name}")
        elif authorization.startswith(BEARER) and self._reviews:
            await self._reviews.admit(authorization.removeprefix(BEARER).strip())
        else:
            raise UnauthenticatedError(
                f"neither a client certificate nor a bearer token; this is {self._name} (docs/how-to/tls.md)"
            )


@dataclass(frozen=True)
class KubernetesApi:
    """The API server, and the folder with this pod's own token and the server's authority."""

    url: str
    account: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "KubernetesApi":
        """That of the cluster in which this pod is. Raises FailedPreconditionError."""
        host, port = (environment.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
        api = cls(f"https://{f'[{host}]' if ':' in str(host) else host}:{port}", ACCOUNT)
        if not host or not (api.account / "token").exists():
            raise FailedPreconditionError(
                f"token_port: tokens are judged by a Kubernetes API server, and none is known: no {api.account}/token; "
                "leave NEXRL_TOKEN_PORT out, or let the pod mount its ServiceAccount's token"
            )
        return api

    def review(self, token: str, audience: str) -> Mapping[str, Any]:
        """The status of a TokenReview. Raises UnavailableError when the server does not answer, or refuses to."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        headers = {
            "Authorization": f"Bearer {(self.account / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        }
        url = f"{self.url}/apis/authentication.k8s.io/v1/tokenreviews"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        try:
            with urllib.request.urlopen(request, timeout=REVIEW_SECONDS, context=trusted) as answer:
                status: Mapping[str, Any] = json.load(answer)["status"]
                return status
        except (OSError, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise UnavailableError(f"the token cannot be judged: {url}: {error}") from None


class TokenReviews:
    """Judges tokens for the experiment `name`: by their audience, and the namespace of their ServiceAccount.

    The audience alone would not do: whoever runs a pod, anywhere in the cluster, chooses the audience of its tokens.
    """

    def __init__(self, name: str, api: KubernetesApi) -> None:
        self._name = name
        self._account = f"system:serviceaccount:{namespace_of(name)}:"
        self._api = api
        self._good_until: dict[bytes, float] = {}
        self._reviewing = asyncio.Lock()

    async def admit(self, token: str) -> None:
        """Return when the token is good. Raises UnauthenticatedError, PermissionDeniedError or UnavailableError."""
        digest = hashlib.sha256(token.encode()).digest()
        if self._is_known(digest):
            return
        if self._name not in (audiences := _audiences(token)):  # it would be refused; this way we can say why
            raise PermissionDeniedError(f"the token is for {', '.join(audiences)}; this is {self._name}")
        async with self._reviewing:
            if not self._is_known(digest):
                self._judge(await asyncio.to_thread(self._api.review, token, self._name))
                self._remember(digest)

    def _judge(self, status: Mapping[str, Any]) -> None:
        if not status.get("authenticated") or self._name not in status.get("audiences", ()):
            raise UnauthenticatedError(f"the token is not good: {status.get('error', 'refused by its review')}")
        account = str(status["user"]["username"])
        if not account.startswith(self._account):
            raise PermissionDeniedError(f"the token is that of {account}; wanted: {self._account}*")

    def _is_known(self, digest: bytes) -> bool:
        return self._good_until.get(digest, 0.0) > time.monotonic()

    def _remember(self, digest: bytes) -> None:
        if len(self._good_until) >= MAX_REMEMBERED:
            self._good_until.clear()
        self._good_until[digest] = time.monotonic() + REMEMBERED_SECONDS


def _audiences(token: str) -> Sequence[str]:
    """For whom the token says that it is; it is not verified yet."""
    try:
        payload = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["aud"]
        return [found] if isinstance(found, str) else [str(audience) for audience in found]
    except (IndexError, KeyError, TypeError, ValueError):
        raise UnauthenticatedError("the bearer token is no ServiceAccount's token") from None
