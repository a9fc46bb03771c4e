"""HAProxy's configuration, and the commands that change its servers while it runs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millrace_ray.serving.errors import ServingError

SLOTS = 256
"""Replicas of an application, at most."""
PREFIX_BYTES = 2048
"""The beginning of a body that chooses the replica."""
LOST = '{"error":"the replica was lost","error_type":"incomplete_generation"}'
NO_REPLICA = '{"error":"no replica is ready","error_type":"overloaded"}'
BACKENDS = ("ready", "live")
ASK_SECONDS = 5.0

CONFIG = """\
global
    maxconn 16384
    no strict-limits
    # Otherwise two applications at one port would share it, and their clients.
    noreuseport
    stats socket {socket} mode 600 level admin

defaults
    mode http
    timeout connect 2s
    # The longest that HAProxy knows: a stream may be silent for as long as its request runs. Dead peers are found by
    # keepalive.
    timeout client 24d
    timeout server 24d
    timeout http-request 2m
    timeout http-keep-alive 75s
    option clitcpka
    clitcpka-idle 30s
    clitcpka-intvl 5s
    clitcpka-cnt 6
    option srvtcpka
    srvtcpka-idle 3s
    srvtcpka-intvl 1s
    srvtcpka-cnt 3
    # Only what was not sent at all is tried again, each time elsewhere.
    retries 3
    retry-on conn-failure
    option redispatch 1
    # A request that goes into an idle connection to a dead node could not be sent again.
    option http-server-close
    # Each token goes on at once; a client that leaves ends its request.
    option http-no-delay
    option abortonclose
    option httpchk
    # The hash would choose a dead server for each further try, so one refused connection takes it out.
    default-server check inter 1s fall 2 rise 1 tcp-ut 10s observe layer4 error-limit 1 on-error mark-down
    http-error status 502 content-type application/json string '{lost}'
    http-error status 503 content-type application/json string '{no_replica}' hdr Retry-After 5

frontend clients
    bind {bind}
    http-request wait-for-body time 10s at-least {prefix} if METH_POST
    # While all recover, requests wait in one that lives.
    use_backend live if {{ nbsrv(ready) eq 0 }}
    default_backend ready

# The beginning of the body chooses a replica, unless that has a quarter more requests than the mean.
backend ready
    balance hash req.body,bytes(0,{prefix})
    hash-type consistent djb2 avalanche
    hash-balance-factor 125
    http-check send meth GET uri /readyz
    http-check expect status 200
    server-template r 1-{slots} 127.0.0.1:1 disabled

backend live
    balance leastconn
    http-check send meth GET uri /livez
    http-check expect status 200
    server-template r 1-{slots} 127.0.0.1:1 disabled
"""


class State(StrEnum):
    """Of a server, in HAProxy's words."""

    READY = "ready"
    DRAIN = "drain"
    """It gets no new requests."""


@dataclass(frozen=True, slots=True)
class Server:
    """A replica in HAProxy's list."""

    slot: int
    """1 to `SLOTS`; the same on all nodes, so that they choose alike."""
    address: str
    port: int
    state: State


def config(*, hostname: str, port: int, admin: Path) -> str:
    """The configuration of a node's HAProxy, whose commands come over the socket `admin`."""
    bind = f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}"
    return CONFIG.format(
        socket=admin,
        bind=bind,
        prefix=PREFIX_BYTES,
        slots=SLOTS,
        lost=LOST,
        no_replica=NO_REPLICA,
    )


def changes(before: Mapping[int, Server], after: Mapping[int, Server]) -> list[str]:
    """The commands that lead from one list of servers, by slot, to another."""
    commands = []
    for slot in sorted(before.keys() | after.keys()):
        old, new = before.get(slot), after.get(slot)
        if old == new:
            continue
        moved = old is None or new is None or (old.address, old.port) != (new.address, new.port)
        for backend in BACKENDS:
            name = f"{backend}/r{slot}"
            if moved:
                commands.append(f"set server {name} state maint")
            if new is not None:
                if moved:
                    commands.append(f"set server {name} addr {new.address} port {new.port}")
                commands.append(f"set server {name} state {new.state}")
    return commands


def ask(admin: Path, commands: Sequence[str]) -> str:
    """Send commands; return HAProxy's answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ASK_SECONDS)
        connection.connect(str(admin))
        connection.sendall("; ".join(commands).encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts).decode(errors="replace")


LEASE_TICKS = 8
"""A replica that renewed nothing for so many ticks is gone."""


@dataclass(slots=True)
class Lease:
    """A replica's place in the list."""

    server: Server
    ticks_left: int = LEASE_TICKS


class Replicas:
    """Leases by replica. Time is counted in ticks of the owner, so that an owner that was held up ends no lease."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def servers(self) -> list[Server]:
        return [lease.server for lease in self._leases.values()]

    def hold(self, replica: str, address: str, port: int, *, slot: int | None) -> bool:
        """Enter a replica, or renew its lease; whether it is new. It gets its former `slot` if that is free."""
        lease = self._leases.get(replica)
        if lease is not None:
            lease.ticks_left = LEASE_TICKS
            return False
        server = Server(self._free_slot(slot), address, port, State.READY)
        self._leases[replica] = Lease(server)
        return True

    def slot_of(self, replica: str) -> int:
        """The slot of a replica that has a lease."""
        return self._leases[replica].server.slot

    def drain(self, replica: str) -> None:
        """No new requests for it."""
        lease = self._leases.get(replica)
        if lease is not None:
            old = lease.server
            lease.server = Server(old.slot, old.address, old.port, State.DRAIN)

    def remove(self, replica: str) -> None:
        self._leases.pop(replica, None)

    def tick(self) -> None:
        """Remove those that did not renew their lease."""
        for replica, lease in list(self._leases.items()):
            lease.ticks_left -= 1
            if lease.ticks_left < 0:
                del self._leases[replica]

    def _free_slot(self, former: int | None) -> int:
        taken = {lease.server.slot for lease in self._leases.values()}
        if former is not None and former not in taken:
            return former
        free = next((slot for slot in range(1, SLOTS + 1) if slot not in taken), None)
        if free is None:
            raise ServingError(f"HAProxy has room for {SLOTS} replicas of an application")
        return free
