"""TCP ports for servers that are started later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the kernel gives to nobody else meanwhile.

    A server listens there all the same if it sets SO_REUSEADDR, as ours do; until then connections are refused.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])
