"""TLS settings, and certificates that are read again when their files change (docs/how-to/tls.md).

An experiment has one name, and each of its certificates has that name among its DNS names. Clients require it of
servers, whatever their addresses, and servers require it of clients.
"""

import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nexrl.errors import InvalidArgumentError, Violation

log = logging.getLogger(__name__)

OPERATOR = "operator.nexrl.dev"
"""The name in the operator's certificate. Every server admits it."""
_EXPERIMENTS = "experiment.nexrl.dev"

_CERTIFICATE = ("NEXRL_TLS_CERT", "NEXRL_TLS_KEY")
_TRUST = ("NEXRL_TLS_CA", "NEXRL_TLS_NAME")
_TOKEN = "NEXRL_TOKEN_FILE"


def experiment_name(namespace: str, experiment: str) -> str:
    """Return the name of an experiment in certificates, which is also the audience of its ServiceAccount tokens."""
    return f"{experiment}.{namespace}.{_EXPERIMENTS}"


def namespace_of(name: str) -> str:
    """Return the namespace in the name of an experiment."""
    return name.removesuffix(f".{_EXPERIMENTS}").rpartition(".")[2]  # the experiment's own name may contain dots


@dataclass(frozen=True)
class Tls:
    """TLS of one process: its certificate and key, or its token (clients only), and what it requires of peers."""

    ca: Path
    name: str
    """Name that a peer's certificate must have."""
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None


def tls_from_environment(environment: Mapping[str, str] = os.environ) -> Tls | None:
    """Return the settings in NEXRL_TLS_*; None if none is set. Raises InvalidArgumentError if some are missing."""
    found = {name: environment.get(name, "") for name in (*_CERTIFICATE, *_TRUST, _TOKEN)}
    if not any(found.values()):
        return None
    wanted = _TRUST if found[_TOKEN] and not any(map(found.get, _CERTIFICATE)) else (*_CERTIFICATE, *_TRUST)
    if missing := [Violation(name, "missing; other TLS settings are set") for name in wanted if not found[name]]:
        raise InvalidArgumentError("settings: " + "; ".join(map(str, missing)), violations=missing)
    certificate, key, ca, name, token = found.values()
    if certificate:
        return Tls(Path(ca), name, Path(certificate), Path(key))
    return Tls(Path(ca), name, token=Path(token))


@dataclass(frozen=True)
class Credentials:
    """Content of the files, in PEM. Certificate and key are empty for a client with a token."""

    ca: bytes
    certificate: bytes
    key: bytes


class CredentialFiles:
    """The files of a `Tls`, read again when they change. Raises InvalidArgumentError if they are not valid at first."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._paths = [path for path in (tls.ca, tls.certificate, tls.key) if path]
        self._stamp = self._stamp_now()
        self._credentials = self._read()

    def newest(self) -> Credentials:
        """Return the newest valid content of the files; the same object until they change. Thread-safe."""
        stamp = self._stamp_now()  # before reading: a later change is then noticed by the next call
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._credentials = self._read()
                log.info("reloaded the certificate", extra={"file": str(self.tls.certificate or self.tls.ca)})
            except InvalidArgumentError as error:
                log.error("cannot reload the certificate; the old one stays in use: %s", error)
        return self._credentials

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of an HTTP server: newest certificate per handshake, optional client certificate."""
        shown, newest = self.newest(), self._new_server_context()
        first = newest

        def renew(connection: ssl.SSLObject, server_name: str, _: ssl.SSLContext) -> None:
            nonlocal shown, newest
            if self.newest() is not shown:
                shown, newest = self.newest(), self._new_server_context()
            connection.context = newest

        first.sni_callback = renew
        return first

    def _new_server_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.tls.ca))
        context.verify_mode = ssl.CERT_OPTIONAL
        if self.tls.certificate:
            context.load_cert_chain(self.tls.certificate, self.tls.key, password=_no_password)
        return context

    def _read(self) -> Credentials:
        tls = self.tls
        try:
            self._new_server_context()  # raises if a file cannot be parsed, or key and certificate do not match
            certificate, key = (path.read_bytes() if path else b"" for path in (tls.certificate, tls.key))
            return Credentials(tls.ca.read_bytes(), certificate, key)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            files = ", ".join(map(str, self._paths))
            raise InvalidArgumentError(f"TLS: {files}: {error}; use PEM files and a key without a password") from None

    def _stamp_now(self) -> list[tuple[int, int]] | None:
        try:
            return [(found.st_mtime_ns, found.st_ino) for found in (path.stat() for path in self._paths)]
        except OSError:
            return None


def _no_password() -> str:
    raise ValueError("the key has a password")
