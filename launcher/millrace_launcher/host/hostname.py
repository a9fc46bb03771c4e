"""The address behind a name that the user gave to listen on."""

from __future__ import annotations

import ipaddress
import socket

from millrace_router.config import RouterConfig


def resolved(config: RouterConfig) -> RouterConfig:
    """Return the settings with the name's address in its place; raises OSError for a name without one.

    This is for a name from the command line. One from the environment means any address: containers export their own
    name as HOSTNAME.
    """
    name = config.hostname
    if name == "localhost":
        return config
    try:
        ipaddress.ip_address(name)
    except ValueError:
        address = socket.gethostbyname(name)
        return config.model_copy(update={"hostname": address})
    return config
