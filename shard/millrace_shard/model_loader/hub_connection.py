"""Whether the hub can be reached at all, found out at once."""

from __future__ import annotations

import logging
import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_SECONDS = 5.0
PORTS = {"http": 80, "https": 443}

log = logging.getLogger(__name__)


class HubUnreachableError(ConnectionError):
    """The host of the hub has no address, or nobody answers there."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}: name a folder, set HF_ENDPOINT to a hub that can be reached, or HF_HUB_OFFLINE=1 to use only"
            " the cache"
        )


@cache
def check_connection(endpoint: str) -> None:
    """Connect to the hub's host, unless a proxy is set, which may reach it. Raises HubUnreachableError.

    It does so once in the life of a process: what fails later may be a short disturbance.

    The hub's client would repeat a failed request for minutes, since it cannot tell a wrong address from that.
    """
    log.info("asking %s", endpoint)
    url = urlsplit(endpoint)
    host, scheme = url.hostname or "", url.scheme or "https"
    proxies = getproxies()
    if (scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return
    try:
        address = host, url.port or PORTS.get(scheme, 443)
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except socket.gaierror:
        raise HubUnreachableError(f"the name {host} cannot be resolved") from None
    except TimeoutError:
        raise HubUnreachableError(f"{host} does not answer within {CONNECT_SECONDS:g} s") from None
    except OSError as error:
        raise HubUnreachableError(f"{host} cannot be reached: {error.strerror or error}") from None
