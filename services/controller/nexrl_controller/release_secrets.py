"""Secrets that a release of the chart needs and no template may make: made once, and never changed after.

Run by the init container of the operator, whose Deployment owns them. Templates would make others at each rendering.
"""

import asyncio
import base64
import secrets
from collections.abc import Mapping

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from nexrl.authority import AUTHORITY_DAYS, Issued, issue, new_ca
from nexrl.k8s.api import DEPLOYMENT, SECRET, Api, ApiError, Object, connect_cluster

REDIS = "redis.nexrl.dev"
"""The name in the certificate of Redis besides those of its Service; no service lets it in."""


class ReleaseSettings(BaseSettings):
    """Names of what the release needs; "" for what it does not."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_RELEASE_", frozen=True)

    namespace: str = Field(description="Namespace of the release.")
    deployment: str = Field(description="Deployment that owns the Secrets.")
    redis_host: str = Field(default="", description="Service of Redis, as nexrl-redis.")
    redis_secret: str = Field(default="", description="Secret for the password of Redis.")
    redis_tls_secret: str = Field(default="", description="Secret for the certificate of Redis.")
    ca_secret: str = Field(default="", description="Secret for the authority that signs it, and those of experiments.")


async def make_secrets(api: Api, settings: ReleaseSettings) -> None:
    """Make those that are not there yet."""
    owner = await api.get(DEPLOYMENT, settings.namespace, settings.deployment)
    assert owner, f"Deployment {settings.deployment}: this runs in one of its pods"
    labels = owner["metadata"].get("labels", {})
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": settings.deployment}
    metadata: Object = {
        "namespace": settings.namespace,
        "labels": labels,
        "ownerReferences": [reference | {"uid": owner["metadata"]["uid"]}],
    }
    if settings.redis_secret:
        await _ensure(api, metadata, settings.redis_secret, {"password": secrets.token_urlsafe(32).encode()})
    if settings.ca_secret:
        made = new_ca()
        found = await _ensure(api, metadata, settings.ca_secret, {"tls.crt": made.certificate, "tls.key": made.key})
        ca = Issued(found["tls.crt"], found["tls.key"])
        if settings.redis_tls_secret:
            # Redis does not read it again while it runs, so it lives as long as its authority.
            shown = issue(ca, _names(settings), REDIS, days=AUTHORITY_DAYS)
            files = {"tls.crt": shown.certificate, "tls.key": shown.key, "ca.crt": ca.certificate}
            await _ensure(api, metadata, settings.redis_tls_secret, files)


def _names(settings: ReleaseSettings) -> list[str]:
    host, namespace = settings.redis_host, settings.namespace
    return [host, f"{host}.{namespace}", f"{host}.{namespace}.svc", "localhost"]


async def _ensure(api: Api, metadata: Object, name: str, content: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Make the Secret unless it is there; gives what it holds."""
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata | {"name": name}, "data": data}
    try:
        found = await api.create(secret)
    except ApiError as error:
        if error.code != 409:  # another pod of the operator was first
            raise
        existing = await api.get(SECRET, metadata["namespace"], name)
        assert existing, f"Secret {name} is there and is not"
        found = existing
    return {key: base64.b64decode(value) for key, value in found["data"].items()}


async def _main() -> None:
    async with connect_cluster() as api:
        await make_secrets(api, ReleaseSettings())


if __name__ == "__main__":
    asyncio.run(_main())
