"""Checks of ports, and removal of dead socket files."""

from __future__ import annotations

import socket
from pathlib import Path

from millrace_launcher.errors import ArgumentValidation


def refuse_busy_port(hostname: str, port: int, flag: str = "--port") -> None:
    """Raise ArgumentValidation if a program could not listen there; `flag` chooses the place."""
    try:
        family, kind, *_, place = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ArgumentValidation(
            f"cannot listen on {hostname} port {port} ({error.strerror}); choose another {flag}"
        ) from error


def clear_socket(path: Path) -> None:
    """Remove the socket of a dead server; raise ArgumentValidation for any other file."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise ArgumentValidation(f"{path} exists and is no socket; choose another --shard-uds-path")
    try:
        removed = remove_dead_socket(path)
    except OSError as error:
        raise ArgumentValidation(f"{path} cannot be taken over ({error.strerror})") from error
    if not removed:
        raise ArgumentValidation(
            f"another server is listening on {path}; stop it or choose another --shard-uds-path"
        )


def remove_dead_socket(path: Path) -> bool:
    """Remove a socket without a listener; False if a process listens on it, True if it does not exist."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            return True
        else:
            return False
    return True
