"""HAProxy and Envoy with the files in deploy/, without TLS, before replicas."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from bench.harness.server import RunningServer, free_port, running
from bench.scale.replicas import Replica

ROOT = Path(__file__).parents[2]
SEARCHED = f"/usr/sbin:/usr/bin:{ROOT}/.venvs/envoy/bin"


def program(name: str) -> str | None:
    """Where HAProxy or Envoy is; None where it is not installed."""
    return shutil.which(name) or shutil.which(name, path=SEARCHED)


@contextmanager
def proxying(
    name: str,
    replicas: Sequence[Replica],
    folder: Path,
    *,
    prefix_bytes: int = 2048,
    in_turn: bool = False,
) -> Iterator[RunningServer]:
    """Run a proxy, by the hash of the first `prefix_bytes` or `in_turn`, for the length of the block."""
    port, found = free_port(), program(name)
    assert found is not None, name
    write = {"haproxy": _haproxy, "envoy": _envoy}[name]
    command = [found, *write(folder, port, replicas, prefix_bytes, in_turn=in_turn)]
    with running(command, port=port, log=folder / f"{name}.log", environment={}) as proxy:
        yield proxy


def _haproxy(
    folder: Path, port: int, replicas: Sequence[Replica], prefix_bytes: int, *, in_turn: bool
) -> list[str]:
    text = (ROOT / "deploy" / "haproxy" / "haproxy.cfg").read_text()
    head, _, _ = text.partition("    server a ")
    head = re.sub(r"bind :443.*", f"bind 127.0.0.1:{port}", head)
    head = head.replace("2048", str(prefix_bytes))
    if in_turn:
        head = re.sub(r" +(balance hash|hash-type|hash-balance-factor).*\n", "", head)
        head = head.replace("    option httpchk", "    balance roundrobin\n    option httpchk")
    servers = "".join(
        f"    server s{number} 127.0.0.1:{one.port}\n" for number, one in enumerate(replicas)
    )
    path = folder / "haproxy.cfg"
    path.write_text(head + servers)
    return ["-db", "-f", str(path)]


def _envoy(
    folder: Path, port: int, replicas: Sequence[Replica], prefix_bytes: int, *, in_turn: bool
) -> list[str]:
    text = (ROOT / "deploy" / "envoy" / "envoy.yaml").read_text()
    config = yaml.safe_load(text.replace("LENGTH = 2048", f"LENGTH = {prefix_bytes}"))
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    del listener["filter_chains"][0]["transport_socket"]
    (cluster,) = config["static_resources"]["clusters"]
    if in_turn:
        cluster["lb_policy"] = "ROUND_ROBIN"
        del cluster["common_lb_config"]["consistent_hashing_lb_config"]
    endpoints = [
        {
            "endpoint": {
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": one.port}}
            }
        }
        for one in replicas
    ]
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = endpoints
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    one = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    return ["-c", str(path), *one]
