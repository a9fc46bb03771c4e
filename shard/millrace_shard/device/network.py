"""The network interface of the collectives."""

from __future__ import annotations

import logging
import os
import socket

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
DISCARD_PORT = 9
"""Connecting a datagram socket sends nothing; the port is of no account."""

logger = logging.getLogger(__name__)


def use_interface_to(host: str) -> None:
    """Have gloo and NCCL use the interface that leads to `host`; what the environment says already is kept.

    By themselves they take that of this machine's name, or the first one, which need not reach the other ranks.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    interface = interface_to(host) if missing else None
    if interface is not None:
        os.environ.update(dict.fromkeys(missing, interface))
        logger.debug("collectives use the interface %s, which leads to %s", interface, host)


def interface_to(host: str) -> str | None:
    """The interface from which `host` is reached; None if no route leads there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, DISCARD_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # An IPv6 address of a link has its interface after a percent sign.
        if any(each.address.partition("%")[0] == own.partition("%")[0] for each in addresses):
            return name
    return None
