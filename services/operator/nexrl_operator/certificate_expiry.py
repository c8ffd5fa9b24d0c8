"""The metric that says when certificates expire. The chart's alert NexrlCertificateExpires reads it."""

import logging

from cryptography import x509
from prometheus_client import Gauge

log = logging.getLogger(__name__)

AUTHORITY, OWN = "authority", "operator"
"""The authorities that the operator trusts, and its own certificate. Those of experiments are named as their Secret."""

EXPIRES = Gauge(
    "nexrl_certificate_expiration_timestamp_seconds", "When a certificate expires.", ["namespace", "certificate"]
)


def show_expiry(namespace: str, name: str, pem: bytes) -> None:
    """Show when the certificate in `pem` expires. What is no certificate is logged: the process that loads it fails."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        log.warning("certificate %s/%s: %s", namespace, name, error)
        return
    # Of a chain, the first is the certificate itself. Of authorities, the old ones expire while the newest is in use.
    ends = [each.not_valid_after_utc.timestamp() for each in found]
    EXPIRES.labels(namespace, name).set(max(ends) if name == AUTHORITY else ends[0])


def hide_expiry(namespace: str, name: str) -> None:
    """Remove a certificate that nothing uses any more, so that nobody is alerted when it expires."""
    EXPIRES.remove(namespace, name)
