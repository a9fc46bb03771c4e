"""Three hosts in this machine with certificates, or a Ray cluster of four."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme

from millrace_testing.cluster.hosts import Host, hosts, missing
from millrace_testing.cluster.ray_cluster import RayCluster, Redis, redis
from millrace_testing.launcher.certificates import Certificate, certificate


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Sequence[Host]]:
    if lack := missing():
        pytest.skip(f"hosts cannot be made here: {lack}")
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
    if lack := missing():
        pytest.skip(f"hosts cannot be made here: {lack}")
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
