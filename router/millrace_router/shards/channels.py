"""gRPC channels to shards: plain over unix sockets, TLS with certificates on both sides over TCP."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path
from typing import Protocol

import grpc

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    # Shards that start are tried often: each pause would be half as long again.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
NETWORK_OPTIONS = (
    # A host that vanishes closes no connection.
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class TlsError(Exception):
    """The TLS files are missing or unusable."""


class TlsFiles(Protocol):
    """The TLS flags of `RouterConfig`."""

    @property
    def shard_tls_cert(self) -> Path | None:
        """The router's certificate."""

    @property
    def shard_tls_key(self) -> Path | None:
        """The key of that certificate."""

    @property
    def shard_tls_ca(self) -> Path | None:
        """The authority that signs the certificates of shards."""


def tls_from(config: TlsFiles) -> grpc.ChannelCredentials | None:
    """Return the router's certificate and the authority it trusts, for shards at TCP addresses; None without TLS flags.

    Raises:
        TlsError: one of the three files is missing or unusable.

    """
    cert, key, ca = config.shard_tls_cert, config.shard_tls_key, config.shard_tls_ca
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        files = {"cert": cert, "key": key, "ca": ca}
        missing = [f"--shard-tls-{name}" for name, path in files.items() if path is None]
        raise TlsError(f"TLS needs {' and '.join(missing)} too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # Without a password function OpenSSL asks the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
        context.load_verify_locations(ca)
        return grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
    except OSError as error:
        raise TlsError(f"{cert}, {key} or {ca} cannot be used for TLS: {error}") from error


def open_channel(address: str, tls: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Make a channel to a gRPC target; with `tls`, the shard's certificate must name the target's host."""
    if is_local(address):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *NETWORK_OPTIONS)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls, options=options)


def is_local(address: str) -> bool:
    """Return whether `address` is a Unix socket."""
    return address.startswith("unix:")


def is_exposed(address: str, tls: grpc.ChannelCredentials | None) -> bool:
    """Return whether prompts cross a network to `address` without encryption."""
    if tls is not None or is_local(address):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
