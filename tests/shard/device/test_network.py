from __future__ import annotations

import psutil
import pytest

from millrace_shard.device.process_group import VARIABLES, interface_to, use_interface_to


def test_the_interface_that_leads_to_an_address_is_found() -> None:
    assert interface_to("127.0.0.1") == interface_to("localhost") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET" and not each.address.startswith("127."):
                # The kernel sends to its own addresses by the loopback interface, from the address itself.
                assert interface_to(each.address) == name


def test_a_name_that_does_not_resolve_leads_nowhere() -> None:
    assert interface_to("nowhere.invalid") is None


def test_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = VARIABLES
    monkeypatch.setenv(gloo, "eth9")
    monkeypatch.setenv(nccl, "")
    monkeypatch.delenv(nccl)
    use_interface_to("127.0.0.1")
    import os

    assert (os.environ[gloo], os.environ[nccl]) == ("eth9", "lo")
