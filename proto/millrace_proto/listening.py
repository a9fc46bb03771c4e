"""A TCP port that the launcher binds and keeps, and on which routers listen one after the other."""

from __future__ import annotations

import socket


def bound(hostname: str, port: int) -> socket.socket:
    """Bind an address without listening, so that clients are refused until a server is ready.

    Raises:
        OSError: the address is in use, or belongs to another host.

    """
    family, kind, *_, place = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError:
        listener.close()
        raise
    return listener


def inherited(fd: int) -> socket.socket:
    """Own a socket that this process has inherited, and that its children do not inherit.

    Raises:
        OSError: the descriptor is not a socket.

    """
    listener = socket.socket(fileno=fd)
    listener.set_inheritable(False)
    return listener


def refuse_waiting(listener: socket.socket) -> None:
    """Reset the connections that no server has accepted, and refuse further ones until a server listens again."""
    if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.shutdown(socket.SHUT_RDWR)
