"""A hub that cannot be reached is reported at once."""

from __future__ import annotations

import socket

import pytest

from millrace_shard.weights.download import HubUnreachableError, check_connection


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_host_name_without_an_address_is_reported() -> None:
    with pytest.raises(HubUnreachableError, match=r"the name hub\.invalid cannot be resolved"):
        check_connection("https://hub.invalid")


def test_an_unused_port_is_tried_each_time() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    for _ in range(2):
        with pytest.raises(HubUnreachableError, match="cannot be reached: Connection refused"):
            check_connection(endpoint)


def test_a_hub_behind_a_proxy_needs_no_direct_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    check_connection("https://proxied.invalid")
    monkeypatch.setenv("no_proxy", "bypassed.invalid")
    with pytest.raises(HubUnreachableError):
        check_connection("https://bypassed.invalid")
