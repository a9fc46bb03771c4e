"""Certificates of one launch: an authority that only this process has, and what it signs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID = timedelta(days=3650)
"""Certificates are not renewed, so they are valid for longer than a launch lasts."""
CLOCKS_DIFFER = timedelta(days=1)
PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate, its key, and the authority that signed it."""

    cert: bytes
    key: bytes
    ca: bytes


class Authority:
    """Signs certificates for hosts."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Millrace launch")
        self._certificate = (
            _builder(name, name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, host: str) -> Pem:
        """A certificate for an address or a name, for both ends of a connection."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            named: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            named = x509.DNSName(host)
        certificate = (
            _builder(_name(host), self._certificate.subject, key)
            .add_extension(x509.SubjectAlternativeName([named]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return Pem(
            certificate.public_bytes(PEM),
            key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            self._certificate.public_bytes(PEM),
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + VALID)
    )
