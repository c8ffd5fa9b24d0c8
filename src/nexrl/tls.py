"""TLS: who a process is, whom it trusts, and the newest content of the files that say so (docs/how-to/tls.md).

An experiment has one name, which each of its certificates has among its DNS names. Clients require it of servers,
whatever address they have, and servers of clients.
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
"""The name in the operator's certificate, which every server lets in."""
_EXPERIMENTS = "experiment.nexrl.dev"

_CERTIFICATE = ("NEXRL_TLS_CERT", "NEXRL_TLS_KEY")
_TRUST = ("NEXRL_TLS_CA", "NEXRL_TLS_NAME")
_TOKEN = "NEXRL_TOKEN_FILE"


def experiment_name(namespace: str, experiment: str) -> str:
    """The name of an experiment in certificates and, as audience, in ServiceAccount tokens."""
    return f"{experiment}.{namespace}.{_EXPERIMENTS}"


def namespace_of(name: str) -> str:
    """The namespace of the experiment whose name this is."""
    return name.removesuffix(f".{_EXPERIMENTS}").rpartition(".")[2]  # an experiment's name may have dots itself


@dataclass(frozen=True)
class Tls:
    """What a process shows and requires: a certificate with its key, or, as a client only, a token."""

    ca: Path
    name: str
    """Required of the peer."""
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None


def tls_from_environment(environment: Mapping[str, str] = os.environ) -> Tls | None:
    """What NEXRL_TLS_* say; None when none is set. Raises InvalidArgumentError when some are missing."""
    found = {name: environment.get(name, "") for name in (*_CERTIFICATE, *_TRUST, _TOKEN)}
    if not any(found.values()):
        return None
    wanted = _TRUST if found[_TOKEN] and not any(map(found.get, _CERTIFICATE)) else (*_CERTIFICATE, *_TRUST)
    if missing := [Violation(name, "missing; the others of TLS are set") for name in wanted if not found[name]]:
        raise InvalidArgumentError("settings: " + "; ".join(map(str, missing)), violations=missing)
    certificate, key, ca, name, token = found.values()
    if certificate:
        return Tls(Path(ca), name, Path(certificate), Path(key))
    return Tls(Path(ca), name, token=Path(token))


@dataclass(frozen=True)
class Credentials:
    """The content of the files, in PEM; certificate and key are empty for a client that shows a token."""

    ca: bytes
    certificate: bytes
    key: bytes


class CredentialFiles:
    """The files of a `Tls`, read again when they change. Raises InvalidArgumentError when they are no good at first."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._paths = [path for path in (tls.ca, tls.certificate, tls.key) if path]
        self._stamp = self._stamp_now()
        self._credentials = self._read()

    def newest(self) -> Credentials:
        """What the files hold, or what they held when they last were in order; the same object until they change.

        Any thread may ask: gRPC's do.
        """
        stamp = self._stamp_now()  # before reading: what is written meanwhile is read the next time
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._credentials = self._read()
                log.info("certificate read again", extra={"file": str(self.tls.certificate or self.tls.ca)})
            except InvalidArgumentError as error:
                log.error("the certificate that was read before stays in use: %s", error)
        return self._credentials

    def server_context(self) -> ssl.SSLContext:
        """For an HTTP server: shows the newest certificate in each handshake; a client may show one, too."""
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
            self._new_server_context()  # whether they can be parsed and belong together
            certificate, key = (path.read_bytes() if path else b"" for path in (tls.certificate, tls.key))
            return Credentials(tls.ca.read_bytes(), certificate, key)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            files = ", ".join(map(str, self._paths))
            raise InvalidArgumentError(f"TLS: {files}: {error}; PEM files, the key without a password") from None

    def _stamp_now(self) -> list[tuple[int, int]] | None:
        try:
            return [(found.st_mtime_ns, found.st_ino) for found in (path.stat() for path in self._paths)]
        except OSError:
            return None


def _no_password() -> str:
    raise ValueError("the key has a password")
