"""Checks of addresses of ranks on other hosts."""

from __future__ import annotations

import ipaddress

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.settings.arguments import Settings

LAST_PORT = 65535


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host and port; raises ArgumentValidation, which names the `flag`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ArgumentValidation(f"`{flag}` {address} has no port; it must be HOST:PORT")
    if not 0 < int(port) <= LAST_PORT:
        raise ArgumentValidation(f"`{flag}` {address}: a port is 1 to {LAST_PORT}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_elsewhere(settings: Settings) -> None:
    """Raise ArgumentValidation for flags about shards on other hosts that contradict each other or miss some."""
    launcher = settings.launcher
    if launcher.cluster is None:
        if "shards_per_node" in settings.chosen:
            raise ArgumentValidation("`shards_per_node` is for --cluster")
    elif launcher.remote_shards:
        raise ArgumentValidation("`cluster` places the shards itself; leave out --remote-shards")
    elif (launcher.num_shard or 1) % launcher.shards_per_node:
        raise ArgumentValidation(
            f"`num_shard`({launcher.num_shard or 1}) must be a multiple of"
            f" `shards_per_node`({launcher.shards_per_node})"
        )
    _check_addresses(settings)


def _check_addresses(settings: Settings) -> None:
    launcher, router, shard = settings.launcher, settings.router, settings.shard
    addresses = launcher.remote_shards
    files = {
        "shard_tls_cert": router.shard_tls_cert,
        "shard_tls_key": router.shard_tls_key,
        "shard_tls_ca": router.shard_tls_ca,
    }
    given = [name for name, path in files.items() if path is not None]
    if not addresses:
        if given:
            raise ArgumentValidation(f"`{given[0]}` is for --remote-shards")
        return
    hosts = [split_address(address, "remote_shards")[0] for address in addresses]
    doubled = sorted({address for address in addresses if addresses.count(address) > 1})
    if doubled:
        raise ArgumentValidation(f"`remote_shards` has {doubled[0]} twice; each rank has its own")
    if launcher.num_shard not in {None, len(addresses)}:
        raise ArgumentValidation(
            f"`num_shard` is {launcher.num_shard}, and `remote_shards` has {len(addresses)} addresses"
        )
    exposed = [host for host in hosts if not is_loopback(host)]
    if exposed and not given and not shard.allow_insecure_tcp:
        raise ArgumentValidation(
            f"prompts would go to {exposed[0]} in clear text: give --shard-tls-cert, --shard-tls-key and"
            " --shard-tls-ca, or --allow-insecure-tcp if nobody else can read that network"
        )
