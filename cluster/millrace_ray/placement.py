"""Places the ranks of a model in a cluster, and places those anew whose host is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from millrace_proto.version import VERSION
from millrace_ray.certificates import Authority, Pem
from millrace_ray.host import Host, difference
from millrace_ray.rank_actor import RankActor, State
from millrace_ray.spec import Files, Spec

WATCH_SECONDS = 1.0
ASK_SECONDS = 10.0
GONE = (ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError)


class ClusterError(Exception):
    """The cluster cannot run the ranks; `str` is a sentence."""


class Placement:
    """An actor on each host, in one placement group that ends with this process."""

    def __init__(self, spec: Spec, placed: Callable[[Sequence[str], Files], None]) -> None:
        """`placed` receives the addresses of all ranks, at first and whenever they change."""
        self._spec = spec
        self._placed = placed
        self._authority = Authority()
        self._files = _written(self._authority.issue("router"), Path(spec.folder))
        self._actors: list[Any] = []
        self._hosts: list[Host] = []

    def run(self) -> None:
        """Keep the ranks placed. Raises ClusterError."""
        group = self._reserve()
        self._actors = [self._new_actor(group, node) for node in range(self._spec.num_nodes)]
        self._hosts = [self._host_of(actor) for actor in self._actors]
        self._check_versions()
        self._start(range(len(self._actors)))
        while True:
            time.sleep(WATCH_SECONDS)
            moved = self._moved()
            if 0 in moved:
                # All ranks meet at rank 0's host.
                moved = list(range(len(self._actors)))
            if moved:
                self._check_versions()
                self._start(moved)

    def _reserve(self) -> PlacementGroup:
        spec = self._spec
        (name, amount), *_ = spec.bundle.items()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        fitting = [node for node in nodes if node["Resources"].get(name, 0) >= amount]
        if len(fitting) < spec.num_nodes:
            has = sorted((int(node["Resources"].get(name, 0)) for node in nodes), reverse=True)
            raise ClusterError(
                f"{spec.num_nodes} nodes with {amount:g} {name} each are needed;"
                f" the cluster has nodes with {', '.join(map(str, has)) or 'none'}"
            )
        group = placement_group([spec.bundle] * spec.num_nodes, strategy="STRICT_SPREAD")
        if not group.wait(spec.timeout_seconds):
            raise ClusterError(
                f"the cluster did not place {spec.num_nodes} times {amount:g} {name} within"
                f" {spec.timeout_seconds:g} s; others may use them"
            )
        return group

    def _new_actor(self, group: PlacementGroup, node: int) -> Any:  # noqa: ANN401
        bundle = self._spec.bundle
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=node
                ),
                runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
            )
            .remote()
        )

    def _host_of(self, actor: Any) -> Host:  # noqa: ANN401
        """Ask an actor, which may have to be placed first."""
        found: Host = ray.get(actor.host.remote(1 + self._spec.shards_per_node))
        return found

    def _check_versions(self) -> None:
        if found := difference(self._hosts, millrace=VERSION):
            raise ClusterError(found)

    def _start(self, nodes: Sequence[int]) -> None:
        """Start the ranks of these hosts, and tell where all are."""
        spec, master = self._spec, self._hosts[0]
        starts = []
        for node in nodes:
            host = self._hosts[node]
            argv = (
                *spec.argv,
                f"--world-size={spec.num_shard}",
                f"--first-rank={node * spec.shards_per_node}",
                f"--num-shard={spec.shards_per_node}",
                f"--master-addr={master.address}",
                f"--master-port={master.ports[0]}",
                f"--address={_joined(host.address, host.ports[1])}",
            )
            starts.append(
                self._actors[node].start.remote(argv, self._authority.issue(host.address))
            )
        ray.get(starts)
        addresses = [_joined(host.address, port) for host in self._hosts for port in host.ports[1:]]
        self._placed(addresses, self._files)

    def _moved(self) -> list[int]:
        """The nodes whose actor was placed anew, or whose ranks' supervisor has ended."""
        found = []
        for node in range(len(self._actors)):
            if not self._runs(node):
                self._hosts[node] = self._wait_for(node)
                found.append(node)
        return found

    def _runs(self, node: int) -> bool:
        """Whether the actor runs its ranks. Raises ClusterError if its ranks gave up."""
        try:
            state: State = ray.get(self._actors[node].state.remote(), timeout=ASK_SECONDS)
        except GONE:
            return False
        if state.exit_code is not None:
            address = self._hosts[node].address
            raise ClusterError(f"the ranks on {address} ended with exit code {state.exit_code}")
        return state.has_started

    def _wait_for(self, node: int) -> Host:
        while True:
            try:
                return self._host_of(self._actors[node])
            except GONE:
                time.sleep(WATCH_SECONDS)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _written(pem: Pem, folder: Path) -> Files:
    """Write the router's files for this user only."""
    files = Files(*(folder / f"router-{name}.pem" for name in ("cert", "key", "ca")))
    for path, content in ((files.cert, pem.cert), (files.key, pem.key), (files.ca, pem.ca)):
        path.touch(mode=0o600)
        path.write_bytes(content)
    return files
