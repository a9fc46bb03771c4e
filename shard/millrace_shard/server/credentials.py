"""TLS of a shard at a TCP address: it accepts routers with a certificate of its authority."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path

import grpc

from millrace_shard.config import ShardConfig


class CredentialsError(RuntimeError):
    """The address would be open to other hosts, or the TLS files are unusable."""


def server_credentials(config: ShardConfig) -> grpc.ServerCredentials | None:
    """TLS that requires a client certificate, or None for an address without TLS: a unix socket, or loopback.

    Raises:
        CredentialsError: one of the three files is missing or unusable, or other hosts could reach the address without
            TLS.

    """
    if config.address is None:
        return None
    files = {"tls-cert": config.tls_cert, "tls-key": config.tls_key, "tls-ca": config.tls_ca}
    missing = [f"--{name}" for name, path in files.items() if path is None]
    if len(missing) == len(files):
        if not (config.allow_insecure_tcp or is_local(config.address)):
            raise CredentialsError(
                f"--address {config.address} can be reached from other hosts: give --tls-cert, "
                "--tls-key and --tls-ca, or --allow-insecure-tcp if all who reach it may use the model"
            )
        return None
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        raise CredentialsError(f"TLS needs {' and '.join(missing)} too")
    check_files(config.tls_cert, config.tls_key, config.tls_ca)
    return grpc.ssl_server_credentials(
        [(config.tls_key.read_bytes(), config.tls_cert.read_bytes())],
        root_certificates=config.tls_ca.read_bytes(),
        require_client_auth=True,
    )


def is_local(address: str) -> bool:
    """Whether a gRPC target is a unix socket or on the loopback interface."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_files(cert: Path, key: Path, ca: Path) -> None:
    """Raise CredentialsError unless the files are a certificate, its key without a password, and authorities."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password function OpenSSL asks the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
        context.load_verify_locations(ca)
    except OSError as error:
        raise CredentialsError(f"{cert}, {key} or {ca} cannot be used for TLS: {error}") from error
