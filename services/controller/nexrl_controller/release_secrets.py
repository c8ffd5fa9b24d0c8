"""Secrets that a release of the chart needs and no template may make: made once, and never changed after.

Run by the init container of the operator. Templates would make others at each rendering.
"""

import asyncio
import base64
import secrets
from collections.abc import Mapping

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from nexrl.authority import AUTHORITY_DAYS, Issued, issue, new_ca
from nexrl.errors import FailedPreconditionError
from nexrl.k8s.api import CONFIG_MAP, SECRET, Api, ApiError, Object, connect_cluster

REDIS = "redis.nexrl.dev"
"""The name in the certificate of Redis besides those of its Service; no service lets it in."""


class ReleaseSettings(BaseSettings):
    """Names of what the release needs; "" for what it does not."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_RELEASE_", frozen=True)

    namespace: str = Field(description="Namespace of the release.")
    owner: str = Field(description="ConfigMap that owns the Secrets.")
    redis_host: str = Field(default="", description="Service of Redis, as nexrl-redis.")
    redis_secret: str = Field(default="", description="Secret for the password of Redis.")
    redis_tls_secret: str = Field(default="", description="Secret for the certificate of Redis.")
    ca_secret: str = Field(default="", description="Secret for the authority that signs it, and those of experiments.")


async def make_secrets(api: Api, settings: ReleaseSettings) -> None:
    """Make those that are not there yet."""
    owner = await api.get(CONFIG_MAP, settings.namespace, settings.owner)
    if owner is None:
        raise FailedPreconditionError(f"ConfigMap {settings.namespace}/{settings.owner}: not there; the chart makes it")
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
            # Nobody renews it, so it lives as long as its authority.
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
        found = await _kept(api, metadata, name)
    return {key: base64.b64decode(value) for key, value in found["data"].items()}


async def _kept(api: Api, metadata: Object, name: str) -> Object:
    """The Secret that is there, which goes with this release if it went with one before.

    A release of this name that was just uninstalled leaves its Secrets to the garbage collector, which may not have
    been here yet: it must not take them from us. One without an owner, or with a controller, is the user's and stays.
    """
    found = await api.get(SECRET, metadata["namespace"], name)
    assert found, f"Secret {name} is there and is not"
    owners = found["metadata"].get("ownerReferences", [])
    [ours] = metadata["ownerReferences"]
    is_left = bool(owners) and not any(owner["uid"] == ours["uid"] or owner.get("controller") for owner in owners)
    if not is_left:
        return found
    known = {"uid": found["metadata"]["uid"], "ownerReferences": [ours]}  # with the uid it is this one or none
    return await api.merge(SECRET, metadata["namespace"], name, {"metadata": known})


async def _main() -> None:
    async with connect_cluster() as api:
        await make_secrets(api, ReleaseSettings())


if __name__ == "__main__":
    asyncio.run(_main())
