"""The plane of a process, from its command line."""

from __future__ import annotations

import pytest
from bench.profile.router_share import plane_of


@pytest.mark.parametrize(
    ("command", "plane"),
    [
        (["/v/bin/python", "-m", "millrace_router", "--port=1"], "router"),
        (["/v/bin/python", "/v/bin/millrace-shard", "serve"], "shard"),
        (["/v/bin/python3", "-u", "-m", "millrace_launcher"], "launcher"),
        (["/v/bin/python", "-m", "http.server", "x", "millrace_router"], None),
        (["g++", "-c", "x.cpp"], None),
        ([], None),
    ],
)
def test_plane_of_a_command(command: list[str], plane: str | None) -> None:
    assert plane_of(command) == plane
