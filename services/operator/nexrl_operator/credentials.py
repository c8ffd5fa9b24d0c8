"""Certificates and passwords of experiments, and the operator's own certificate. Controllers check the latter."""

import asyncio
import base64
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from nexrl.components import WITH_PODS
from nexrl.errors import FailedPreconditionError
from nexrl.k8s.api import CERTIFICATE, SECRET, Api, Kind
from nexrl.store import Redis, connect_redis
from nexrl.tls import OPERATOR, Tls, experiment_name
from nexrl_operator.api_objects import owner_uid
from nexrl_operator.authority import Issued, is_good, issue
from nexrl_operator.certificate_expiry import AUTHORITY, OWN, hide_expiry, show_expiry
from nexrl_operator.children import Renderer
from nexrl_operator.objects import Object, Owner
from nexrl_operator.redis_logins import RedisLogins
from nexrl_operator.settings import OperatorSettings

RENEW_SECONDS = 6 * 3600.0
"""Time between two checks of the certificates."""
LOGIN = {"username", "password"}
"""Keys of the Secret with the user of an experiment in Redis."""
SECRETS_SECONDS = 60.0
"""Time between two checks that the Secrets of an experiment exist."""


class Credentials:
    """Builds the Secrets that the pods of an experiment mount, according to the operator's settings."""

    def __init__(self, api: Api, settings: OperatorSettings, folder: Path | None = None) -> None:
        self._api = api
        self._settings = settings
        self._folder = folder or Path(tempfile.mkdtemp(prefix="nexrl-operator-"))
        self._ca: Issued | None = None
        self._known_redis_password: str | None = None
        self._certificate_users: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self.redis_logins = RedisLogins(self.release_redis)

    async def begin(self) -> None:
        """Get the operator's own certificate. Raises FailedPreconditionError if there is none."""
        match self._settings.tls:
            case "operator":
                await self._renew_own()
            case "secret":
                self._write(await self._secret(self._settings.release_namespace, self._settings.tls_secret))
            case "certManager":  # if the Secret does not exist yet, this process exits and the kubelet restarts it
                self._write(await self._secret(self._settings.release_namespace, self._settings.own_tls_secret))

    @property
    def ca_file(self) -> Path:
        """The file with the certificate of the authority. It exists only if TLS is enabled."""
        return self._folder / "ca.crt"

    @asynccontextmanager
    async def release_redis(self) -> AsyncIterator[Redis]:
        """Open the release's Redis with the operator's own rights, which no pod of an experiment gets.

        Raises FailedPreconditionError if Redis does not admit the operator, UnavailableError if nothing answers.
        """
        parts = urlsplit(self._settings.redis_url)
        password, address = await self._redis_password(), parts.netloc
        if password:
            user, _, host = address.rpartition("@")
            address = f"{user}:{quote(password, safe='')}@{host}"
        query = parts.query.replace("/etc/nexrl/tls/ca.crt", str(self.ca_file))  # where pods have it
        try:
            async with aclosing(await connect_redis(urlunsplit(parts._replace(netloc=address, query=query)))) as redis:
                yield redis
        except FailedPreconditionError:
            self._known_redis_password = None  # it may have been changed: the next attempt reads it again
            raise
        finally:  # redis-py may lose a cancellation; then the operator would never end
            if (task := asyncio.current_task()) and task.cancelling():
                raise asyncio.CancelledError

    async def _redis_password(self) -> str:
        if not self._settings.redis_secret:
            return ""
        if self._known_redis_password is not None:
            return self._known_redis_password
        name, _, key = self._settings.redis_secret.partition("/")
        held = await self._secret(self._settings.release_namespace, name)
        if key not in held:
            raise FailedPreconditionError(f"Secret {self._settings.release_namespace}/{name}: the key {key} is missing")
        self._known_redis_password = held[key].decode()
        return self._known_redis_password

    def tls(self, namespace: str, name: str) -> Tls | None:
        """Return the operator's TLS settings for calls to the pods of an experiment; None without TLS."""
        if self._settings.tls == "off":
            return None
        paths = {part: self._folder / part for part in ("ca.crt", "tls.crt", "tls.key")}
        return Tls(paths["ca.crt"], experiment_name(namespace, name), paths["tls.crt"], paths["tls.key"])

    def kept(self, renderer: Renderer) -> list[tuple[Kind, str]]:
        """Return kind and name of the objects that `objects` returns while none of them exists."""
        name, kept = renderer.owner.name, []
        if renderer.experiment.spec.redis.url is None:
            kept.append((SECRET, f"{name}-redis"))
        if self._settings.tls in ("operator", "certManager"):
            kept.append((SECRET if self._settings.tls == "operator" else CERTIFICATE, f"{name}-tls"))
        return kept

    async def objects(self, renderer: Renderer, *, is_running: bool) -> list[Object]:
        """Return the Secrets and the cert-manager Certificate of an experiment that must be applied now.

        Its user in Redis exists afterwards, or as soon as Redis answers. Raises FailedPreconditionError.
        """
        owner, settings, made = renderer.owner, self._settings, []
        if renderer.experiment.spec.redis.url is None:
            made += await self._redis_login(renderer, is_running)
        if settings.tls == "operator":
            made += await self._issued(renderer)
        elif settings.tls == "certManager":
            made.append(self._certificate(owner))
        if settings.tls in ("certManager", "secret"):
            await self._show_made_by_others(owner)
        return made

    def forget_certificate(self, owner: Owner) -> None:
        """Remove the metric of an experiment without pods: its certificate is renewed when it starts again.

        With `tls: secret`, the experiments of a namespace share one certificate. Its metric is removed with the last.
        """
        name = self._certificate_name(owner)
        users = self._certificate_users[owner.namespace, name]
        users.discard(owner.name)
        if not users:
            hide_expiry(owner.namespace, name)

    def _certificate_name(self, owner: Owner) -> str:
        return self._settings.tls_secret if self._settings.tls == "secret" else f"{owner.name}-tls"

    async def _show_made_by_others(self, owner: Owner) -> None:
        name = self._certificate_name(owner)
        self._certificate_users[owner.namespace, name].add(owner.name)
        found = await self._api.get(SECRET, owner.namespace, name)  # cert-manager creates it later
        if "tls.crt" in (held := (found or {}).get("data") or {}):
            show_expiry(owner.namespace, name, base64.b64decode(held["tls.crt"]))

    async def keep_redis_login(self, renderer: Renderer) -> None:
        """Have the user of an experiment whose pods are stopping made again if Redis forgets it.

        Raises FailedPreconditionError.
        """
        owner = renderer.owner
        if renderer.experiment.spec.redis.url is not None or self.redis_logins.knows(owner.ledger):
            return
        held = await self._held(owner, "redis")
        if held.keys() >= LOGIN:
            await self.redis_logins.put(owner.ledger, held["password"].decode())

    async def _redis_login(self, renderer: Renderer, is_running: bool) -> list[Object]:
        owner, held = renderer.owner, await self._held(renderer.owner, "redis")
        is_made = held.keys() >= LOGIN
        if is_running and "password" in held and not is_made:
            return []  # pods of an older release, which have the shared password until they start again
        password = held["password"].decode() if is_made else self.redis_logins.password(owner.ledger)
        await self.redis_logins.put(owner.ledger, password)
        login = {"username": owner.ledger.encode(), "password": password.encode()}
        return [] if is_made else [_secret(renderer, "redis", login)]

    async def _held(self, owner: Owner, suffix: str) -> Mapping[str, bytes]:
        """Return what a Secret of this experiment contains; nothing if it does not exist, or belongs to another."""
        known = await self._api.get(SECRET, owner.namespace, f"{owner.name}-{suffix}")
        if known is None or owner_uid(known) != owner.uid:
            return {}
        return {key: base64.b64decode(value) for key, value in known.get("data", {}).items()}

    async def _issued(self, renderer: Renderer) -> list[Object]:
        assert self._ca is not None
        owner = renderer.owner
        name = experiment_name(owner.namespace, owner.name)
        held = await self._held(owner, "tls")
        issued = Issued(held.get("tls.crt", b""), held.get("tls.key", b""))
        is_kept = is_good(self._ca, issued, [name, *_names(owner)], datetime.now(UTC))
        if not is_kept:
            issued = issue(self._ca, _names(owner), name)
        show_expiry(owner.namespace, f"{owner.name}-tls", issued.certificate)
        if is_kept:
            return []
        files = {"tls.crt": issued.certificate, "tls.key": issued.key, "ca.crt": self._ca.certificate}
        return [_secret(renderer, "tls", files)]

    async def _renew_own(self) -> None:
        held = await self._secret(self._settings.release_namespace, self._settings.ca_secret)
        self._ca = Issued(held["tls.crt"], held["tls.key"])
        own = issue(self._ca, [], OPERATOR)
        self._write({"tls.crt": own.certificate, "tls.key": own.key, "ca.crt": self._ca.certificate})

    async def _secret(self, namespace: str, name: str) -> Mapping[str, bytes]:
        found = await self._api.get(SECRET, namespace, name)
        if found is None or not found.get("data"):
            raise FailedPreconditionError(f"Secret {namespace}/{name}: does not exist, or is empty")
        return {key: base64.b64decode(value) for key, value in found["data"].items()}

    def _write(self, files: Mapping[str, bytes]) -> None:
        for name in ("ca.crt", "tls.key", "tls.crt"):
            path = self._folder / name
            path.touch(mode=0o600)
            path.write_bytes(files[name])
        show_expiry(self._settings.release_namespace, OWN, files["tls.crt"])
        show_expiry(self._settings.release_namespace, AUTHORITY, files["ca.crt"])

    def _certificate(self, owner: Owner) -> Object:
        name = f"{owner.name}-tls"
        issuer = {"name": self._settings.issuer_name, "kind": self._settings.issuer_kind, "group": "cert-manager.io"}
        return {
            "apiVersion": "cert-manager.io/v1",
            "kind": "Certificate",
            "metadata": {"name": name, "namespace": owner.namespace, "ownerReferences": [owner.reference()]},
            "spec": {
                "secretName": name,
                "dnsNames": [experiment_name(owner.namespace, owner.name), *_names(owner)],
                "usages": ["server auth", "client auth"],
                "privateKey": {"algorithm": "ECDSA", "rotationPolicy": "Always"},
                "issuerRef": issuer,
            },
        }


def _names(owner: Owner) -> list[str]:
    hosts = [f"{owner.name}-{component.name}" for component in WITH_PODS]
    return [name for host in hosts for name in (host, f"{host}.{owner.namespace}", f"{host}.{owner.namespace}.svc")]


def _secret(renderer: Renderer, suffix: str, content: Mapping[str, bytes]) -> Object:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    return renderer.owner.new_object("v1", "Secret", suffix, suffix) | {"type": "Opaque", "data": data}
