"""Versions of Millrace and torch on the hosts of ranks."""

from __future__ import annotations

import pytest

from millrace_ray.host import Host, difference

HOSTS = (("10.0.0.1", "2.0", "3.0+cpu"), ("10.0.0.2", "2.0", "3.0+cpu"))


@pytest.mark.parametrize(
    ("third", "said"),
    [
        (("2.0", "3.0+cpu"), ""),
        (("2.1", "3.0+cpu"), "10.0.0.3 has Millrace 2.1, and the launcher is 2.0"),
        (("2.0", "3.1+cpu"), "10.0.0.3 has torch 3.1+cpu, and 10.0.0.1 has 3.0+cpu"),
    ],
)
def test_another_version_is_said_with_its_host(third: tuple[str, str], said: str) -> None:
    hosts = [
        Host(address=address, ports=(1,), millrace=millrace, torch=torch)
        for address, millrace, torch in (*HOSTS, ("10.0.0.3", *third))
    ]
    assert difference(hosts, millrace="2.0") == said


def test_a_launcher_of_another_version_is_said() -> None:
    host = Host(address="10.0.0.1", ports=(1,), millrace="2.0", torch="3.0")
    assert (
        difference([host], millrace="1.9") == "10.0.0.1 has Millrace 2.0, and the launcher is 1.9"
    )
