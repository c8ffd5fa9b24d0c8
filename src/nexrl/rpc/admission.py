"""Admits callers: by a certificate of the experiment or the operator, or by a ServiceAccount token."""

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
"""A valid token is reviewed again after this time, so a revoked one is admitted for at most this long."""
MAX_REMEMBERED = 1000
MAX_WAITING = 1000
"""Calls that wait for the review of their token. Each holds up to 64 KiB of its message."""

BEARER = "Bearer "
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Admission:
    """Decides which callers one process admits. Without `reviews` it admits no token."""

    def __init__(self, tls: Tls, reviews: "TokenReviews | None" = None) -> None:
        self._name = tls.name
        self._admitted_names = {tls.name, f"*.{tls.name.partition('.')[2]}", OPERATOR}
        self._reviews = reviews

    async def admit(self, certificate_names: Iterable[str], authorization: str) -> None:
        """Check that the caller is admitted. `certificate_names` are the DNS names in its verified certificate.

        They are empty for a caller without a certificate. Raises UnauthenticatedError or PermissionDeniedError if the
        caller is not admitted, and UnavailableError if its token cannot be reviewed now.
        """
        if names := set(certificate_names):
            if not names & self._admitted_names:
                raise PermissionDeniedError(
                    f"the certificate is for {', '.join(sorted(names))}; this server is {self._name}"
                )
        elif authorization.startswith(BEARER) and self._reviews:
            await self._reviews.admit(authorization.removeprefix(BEARER).strip())
        else:
            raise UnauthenticatedError(
                "the call has no client certificate, and no bearer token that this port accepts; "
                f"this server is {self._name} (docs/how-to/tls.md)"
            )


@dataclass(frozen=True)
class KubernetesApi:
    """The API server of the cluster, and the folder with this pod's token and the server's CA certificate."""

    url: str
    account: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "KubernetesApi":
        """Return the API server of this pod's cluster. Raises FailedPreconditionError outside a cluster."""
        host, port = (environment.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
        api = cls(f"https://{f'[{host}]' if ':' in str(host) else host}:{port}", ACCOUNT)
        if not host or not (api.account / "token").exists():
            raise FailedPreconditionError(
                "token_port: the API server of a cluster reviews the tokens, and this process cannot call it: "
                f"KUBERNETES_SERVICE_HOST is not set, or {api.account}/token does not exist; "
                "unset NEXRL_TOKEN_PORT, or mount the ServiceAccount's token into the pod"
            )
        return api

    def review(self, token: str, audience: str) -> Mapping[str, Any]:
        """Return the status of a TokenReview. Raises UnavailableError if the server does not answer or refuses."""
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
            raise UnavailableError(f"the token cannot be reviewed: {url}: {error}") from None


class TokenReviews:
    """Reviews tokens for the experiment `name`: their audience, and the namespace of their ServiceAccount.

    The audience alone is not enough, because anyone who may run a pod may choose the audience of the pod's tokens.
    """

    def __init__(self, name: str, api: KubernetesApi) -> None:
        self._name = name
        self._account = f"system:serviceaccount:{namespace_of(name)}:"
        self._api = api
        self._good_until: dict[bytes, float] = {}
        self._reviewing = asyncio.Lock()
        self._waiting = 0

    async def admit(self, token: str) -> None:
        """Check that the token is valid. Raises UnauthenticatedError, PermissionDeniedError or UnavailableError."""
        digest = hashlib.sha256(token.encode()).digest()
        if self._is_known(digest):
            return
        if self._name not in (audiences := _audiences(token)):  # the review would also refuse it, but without a reason
            raise PermissionDeniedError(f"the token is for {', '.join(audiences)}; this server is {self._name}")
        if self._waiting >= MAX_WAITING:
            raise UnavailableError(f"the token cannot be reviewed: {self._waiting} calls wait for a review; retry")
        self._waiting += 1
        try:
            await self._review(token, digest)
        finally:
            self._waiting -= 1

    async def _review(self, token: str, digest: bytes) -> None:
        async with self._reviewing:
            if not self._is_known(digest):
                self._judge(await asyncio.to_thread(self._api.review, token, self._name))
                self._remember(digest)

    def _judge(self, status: Mapping[str, Any]) -> None:
        if not status.get("authenticated") or self._name not in status.get("audiences", ()):
            raise UnauthenticatedError(f"the token is not valid: {status.get('error', 'its review refused it')}")
        account = str(status["user"]["username"])
        if not account.startswith(self._account):
            raise PermissionDeniedError(f"the token belongs to {account}; required: {self._account}*")

    def _is_known(self, digest: bytes) -> bool:
        return self._good_until.get(digest, 0.0) > time.monotonic()

    def _remember(self, digest: bytes) -> None:
        if len(self._good_until) >= MAX_REMEMBERED:
            self._good_until.clear()
        self._good_until[digest] = time.monotonic() + REMEMBERED_SECONDS


def _audiences(token: str) -> Sequence[str]:
    """Return the audiences that the token claims. The token is not verified yet."""
    try:
        payload = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["aud"]
        return [found] if isinstance(found, str) else [str(audience) for audience in found]
    except (IndexError, KeyError, TypeError, ValueError):
        raise UnauthenticatedError("the bearer token is not a ServiceAccount token") from None
