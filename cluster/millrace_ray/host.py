"""A host of ranks: its facts, its free ports, and whether the software of all hosts is the same."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Host:
    """Facts of an actor's host."""

    address: str
    ports: tuple[int, ...]
    """Free ones: where the ranks meet, then one for each rank."""
    millrace: str
    torch: str
    """Versions of what is installed there."""


def difference(hosts: Sequence[Host], *, millrace: str) -> str:
    """A sentence about the first host whose Millrace is not the launcher's, or whose torch is not the first host's.

    Empty if there is none.
    """
    first = hosts[0]
    for host in hosts:
        if host.millrace != millrace:
            return f"{host.address} has Millrace {host.millrace}, and the launcher is {millrace}"
        if host.torch != first.torch:
            return f"{host.address} has torch {host.torch}, and {first.address} has {first.torch}"
    return ""
