"""The address of a shard: a unix socket, or a TCP address with TLS."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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


class SocketTaken(RuntimeError):  # noqa: N818
    """Another process uses the path."""


@contextmanager
def for_this_user_only() -> Iterator[None]:
    """Files and sockets that any thread creates inside have at most mode 0600."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


class SocketFile:
    """A path that appears once a server listens there.

    gRPC removes any file at its address at its start and at its end. So gRPC listens at `private`, and `publish`
    renames that socket to `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.private = path.with_name(f"{path.name}.{os.getpid()}")
        self._inode: tuple[int, int] | None = None

    def check_free(self) -> None:
        """Raise SocketTaken if a process listens at the path, or it is not a socket. An abandoned socket is free."""
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SocketTaken(f"{self.path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                return
        raise SocketTaken(f"another process listens at {self.path}; choose another --uds-path")

    def publish(self) -> None:
        """Rename the listening socket from `private` to `path`. Raises SocketTaken."""
        self.check_free()
        self._inode = _inode(self.private)
        self.private.rename(self.path)

    def remove(self) -> None:
        """Remove the path, unless another process has replaced the published socket."""
        self.private.unlink(missing_ok=True)
        try:
            if _inode(self.path) == self._inode:
                self.path.unlink()
        except FileNotFoundError:
            return


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
