"""Free ports of this host."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> tuple[int, ...]:
    """Consecutive ports that nothing listens on."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            try:
                for following in range(port + 1, port + count):
                    held.enter_context(socket.socket()).bind(("", following))
            except (OSError, OverflowError):
                continue
            return tuple(range(port, port + count))
