"""A certificate authority for clusters without cert-manager: it issues the certificates of experiments.

Pure functions on PEM. The caller stores the results; the operator stores them in Secrets.
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 90
CLOCK_SKEW = dt.timedelta(minutes=5)
"""A new certificate is valid from this long ago on, because the clocks of other machines may be behind."""
RENEWED_AFTER = 2 / 3
"""Share of its life after which a certificate is renewed. The remaining third is time to notice a failed renewal."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


def new_ca(name: str = "nexrl") -> Issued:
    """Return a new certificate authority for the life of a release. Only the code that issues may have its key."""
    return _issue(name, None, dt.timedelta(days=AUTHORITY_DAYS), [])


def issue(ca: Issued, names: Sequence[str], experiment: str, *, days: float = CERTIFICATE_DAYS) -> Issued:
    """Return a certificate for servers and clients of an experiment (`nexrl.tls.experiment_name`), or for the operator.

    `names` are the DNS names that clients of other projects use for the services.
    """
    return _issue(experiment.partition(".")[0][:64], ca, dt.timedelta(days=days), [experiment, *names])


def names_of(certificate: bytes) -> list[str]:
    """Return all DNS names in a certificate. Raises ValueError if the bytes are not a certificate."""
    found = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return found.value.get_values_for_type(x509.DNSName)


def renew_at(certificate: bytes) -> dt.datetime:
    """Return when to renew a certificate. Raises ValueError if the bytes are not a certificate."""
    found = x509.load_pem_x509_certificate(certificate)
    return found.not_valid_before_utc + RENEWED_AFTER * (found.not_valid_after_utc - found.not_valid_before_utc)


def is_good(ca: Issued, issued: Issued, names: Sequence[str], now: dt.datetime) -> bool:
    """Return whether `ca` signed `issued`, its key and `names` match, and it is not yet due for renewal."""
    try:
        certificate = x509.load_pem_x509_certificate(issued.certificate)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.certificate))
        is_its_key = load_pem_private_key(issued.key, None).public_key() == certificate.public_key()
        return is_its_key and set(names) <= set(names_of(issued.certificate)) and now < renew_at(issued.certificate)
    except (ValueError, TypeError, InvalidSignature):
        return False


def _issue(common_name: str, ca: Issued | None, life: dt.timedelta, names: Sequence[str]) -> Issued:
    """Return a signed certificate. An authority signs its own certificate; then `ca` is None."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), _subject(common_name)
    authority = x509.load_pem_x509_certificate(ca.certificate) if ca else None
    signer = load_pem_private_key(ca.key, None) if ca else key
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder(
            issuer_name=authority.subject if authority else subject,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - CLOCK_SKEW,
            not_valid_after=now + life,
        )
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(_usage(is_authority=authority is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if authority:
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in dict.fromkeys(names)])
        builder = builder.add_extension(both, critical=False).add_extension(alternative, critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    return Issued(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
