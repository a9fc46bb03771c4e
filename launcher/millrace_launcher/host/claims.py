"""Reserves socket paths and a port of this host for one launcher."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from millrace_launcher.config import HostVariables
from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.host.leftovers import clear_socket
from millrace_launcher.logs import log
from millrace_proto.listening import bound


def socket_paths(prefix: str, num_shard: int) -> list[Path]:
    """The paths of the shards' sockets by rank."""
    return [Path(f"{prefix}-{rank}") for rank in range(num_shard)]


LONGEST_FOLDER_BYTES = 70
"""The path of a socket has at most 107 bytes."""
LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose processes and runtime folder outlive a session."""


def socket_prefix(variables: HostVariables, fallback: str, *, lingering: Path = LINGERING) -> str:
    """The prefix of sockets without a flag: in a private folder that lasts as long as this process, or `fallback`.

    Programs that clean `/tmp` remove sockets there. The runtime folder of a user who does not linger is removed at the
    end of the last session, although a server in the background goes on.
    """
    service, _, _ = (variables.runtime_directory or "").partition(":")
    session = None
    # The user of a container may be without a name.
    with suppress(KeyError):
        if (lingering / pwd.getpwuid(os.getuid()).pw_name).exists():
            session = variables.xdg_runtime_dir
    for folder in filter(None, (service, session)):
        is_short = len(os.fsencode(folder)) <= LONGEST_FOLDER_BYTES
        if is_short and Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return f"{folder}/{Path(fallback).name}"
    return fallback


@contextmanager
def claimed_sockets(prefix: str, *, num_shard: int, may_move: bool) -> Iterator[str]:
    """Reserve `prefix` during the block, and remove dead sockets.

    If it is in use, the result is a prefix in a new private folder, or ArgumentValidation unless `may_move`.
    """
    with ExitStack() as held:
        try:
            held.enter_context(_locked(prefix))
            for path in socket_paths(prefix, num_shard):
                clear_socket(path)
        except ArgumentValidation as taken:
            if not may_move:
                raise
            folder = tempfile.mkdtemp(prefix="millrace-", dir=Path(prefix).parent)
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            prefix = f"{folder}/shard"
            log.info("The shards' sockets are %s-*: %s", prefix, "".join(taken.args))
        yield prefix


@contextmanager
def claimed_port(wanted: int, *, may_move: bool, locks: Path | None = None) -> Iterator[int]:
    """The port where the shards meet: `wanted`, or a free port if that one is in use and `may_move`.

    The shards listen there only after loading, so a lock file in `locks`, by default in the folder of temporary files,
    reserves the port against other launchers.
    """
    with ExitStack() as held:
        port = wanted
        if may_move:
            folder = locks or Path(tempfile.gettempdir())
            try:
                held.enter_context(_locked(f"{folder}/millrace-port-{wanted}"))
                is_ours = _is_free(wanted)
            except ArgumentValidation:
                is_ours = False
            if not is_ours:
                port = _free_port()
                log.info("Port %d is taken, so the shards meet on %d (--master-port)", wanted, port)
        yield port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextmanager
def _locked(prefix: str) -> Iterator[None]:
    """Hold `{prefix}.lock`; the kernel releases it however this process ends."""
    path = Path(f"{prefix}.lock")
    descriptor = _lock(path, prefix)
    try:
        yield
    finally:
        if _names(path, descriptor):
            path.unlink()
        os.close(descriptor)


def _lock(path: Path, prefix: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ArgumentValidation(
                f"{path} cannot be opened ({error.strerror}); choose another --shard-uds-path"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ArgumentValidation(
                f"another server uses {prefix}; stop it or choose another --shard-uds-path"
            ) from None
        # Another launcher may have removed the file between the two calls.
        if _names(path, descriptor):
            return descriptor
        os.close(descriptor)


def _names(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def claimed_address(hostname: str, port: int, flag: str = "--port") -> socket.socket:
    """Bind an address without listening; raises ArgumentValidation, which names the `flag` that chooses another."""
    try:
        return bound(hostname, port)
    except OSError as error:
        raise ArgumentValidation(
            f"cannot listen on {hostname} port {port} ({error.strerror}); choose another {flag}"
        ) from error
