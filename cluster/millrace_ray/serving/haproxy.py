"""HAProxy's configuration, and the commands that change its servers while it runs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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
