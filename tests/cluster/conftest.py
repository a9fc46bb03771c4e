"""Three hosts in this machine, and certificates for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import trustme

from millrace_testing.cluster.hosts import Host, hosts, missing
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
