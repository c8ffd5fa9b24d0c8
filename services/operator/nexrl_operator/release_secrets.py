"""Creates the Secrets that a release of the chart needs: a password and certificates, created once and never changed.

The operator's init container runs this module. A template of the chart would create new ones at each rendering.
"""

import asyncio
import base64
import secrets
from collections.abc import Mapping

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from nexrl.errors import FailedPreconditionError
from nexrl.k8s.api import CONFIG_MAP, SECRET, Api, ApiError, Object, connect_cluster
from nexrl_operator.authority import AUTHORITY_DAYS, Issued, issue, new_ca

REDIS = "redis.nexrl.dev"
"""The name in the certificate of Redis besides those of its Service. No gRPC service accepts it."""


class ReleaseSettings(BaseSettings):
    """Names of the objects that the release needs; "" for those it does not need."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_RELEASE_", frozen=True)

    namespace: str = Field(description="Namespace of the release.")
    owner: str = Field(description="ConfigMap that owns the Secrets.")
    redis_host: str = Field(default="", description="Service of Redis, as nexrl-redis.")
    redis_secret: str = Field(default="", description="Secret for the password of Redis.")
    redis_tls_secret: str = Field(default="", description="Secret for the certificate of Redis.")
    ca_secret: str = Field(default="", description="Secret for the authority that signs it, and those of experiments.")


async def make_secrets(api: Api, settings: ReleaseSettings) -> None:
    """Create the Secrets that do not exist yet."""
    owner = await api.get(CONFIG_MAP, settings.namespace, settings.owner)
    if owner is None:
        raise FailedPreconditionError(
            f"ConfigMap {settings.namespace}/{settings.owner}: does not exist; the chart creates it"
        )
    labels = owner["metadata"].get("labels", {})
    reference = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.kind, "name": settings.owner}
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
            # It is never renewed, so it is valid as long as its authority.
            shown = issue(ca, _names(settings), REDIS, days=AUTHORITY_DAYS)
            files = {"tls.crt": shown.certificate, "tls.key": shown.key, "ca.crt": ca.certificate}
            await _ensure(api, metadata, settings.redis_tls_secret, files)


def _names(settings: ReleaseSettings) -> list[str]:
    host, namespace = settings.redis_host, settings.namespace
    return [host, f"{host}.{namespace}", f"{host}.{namespace}.svc", "localhost"]


async def _ensure(api: Api, metadata: Object, name: str, content: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Create the Secret unless it exists; returns its content."""
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata | {"name": name}, "data": data}
    try:
        found = await api.create(secret)
    except ApiError as error:
        if error.code != 409:  # it exists, or another pod of the operator was faster
            raise
        found = await _kept(api, metadata, name)
    return {key: base64.b64decode(value) for key, value in found["data"].items()}


async def _kept(api: Api, metadata: Object, name: str) -> Object:
    """Return the existing Secret; if an earlier release owned it, this release owns it now.

    The garbage collector may not yet have deleted the Secrets of an earlier release of this name, and must not do so
    now. A Secret without an owner, or with a controller, is the user's and is not changed.
    """
    found = await api.get(SECRET, metadata["namespace"], name)
    assert found, f"Secret {name} exists and cannot be read"
    owners = found["metadata"].get("ownerReferences", [])
    [ours] = metadata["ownerReferences"]
    is_left = bool(owners) and not any(owner["uid"] == ours["uid"] or owner.get("controller") for owner in owners)
    if not is_left:
        return found
    # With the uid, the API server refuses to change another Secret of this name.
    known = {"uid": found["metadata"]["uid"], "ownerReferences": [ours]}
    return await api.merge(SECRET, metadata["namespace"], name, {"metadata": known})


async def _main() -> None:
    async with connect_cluster() as api:
        await make_secrets(api, ReleaseSettings())


if __name__ == "__main__":
    asyncio.run(_main())
