"""Removes what killed processes leave: sockets without a listener, and files in shared memory."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from millrace_launcher.errors import ArgumentValidation


def clear_socket(path: Path) -> None:
    """Remove the socket of a dead server; raise ArgumentValidation for any other file."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise ArgumentValidation(
            f"{path} exists and is not a socket; choose another --shard-uds-path"
        )
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


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def remove_registration(pid: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove the files with which the OpenMP runtime of an ended process was registered.

    Intel's and LLVM's runtimes make `__KMP_REGISTERED_LIB_{pid}_{uid}` of 4 KiB, and remove it unless they are killed.
    """
    for entry in folder.glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
        with suppress(OSError):
            entry.unlink()
