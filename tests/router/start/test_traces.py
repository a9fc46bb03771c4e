"""Whether traces can be exported, before anything else starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millrace_router.config import RouterConfig
from millrace_router.start.shards import StartupError
from millrace_router.start.traces import MODULES, PACKAGES, check_traces
from millrace_testing.project import ROOT


def config_of(protocol: str | None = None, endpoint: str | None = "http://c") -> RouterConfig:
    return RouterConfig.model_validate(
        {"model_folder": Path("m"), "otlp_endpoint": endpoint, "otlp_protocol": protocol}
    )


@pytest.mark.parametrize("protocol", MODULES)
def test_what_is_installed_is_enough(protocol: str) -> None:
    check_traces(config_of(protocol))


@pytest.mark.parametrize("protocol", MODULES)
def test_missing_packages_are_named(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULES[protocol], raising=False)
    monkeypatch.setitem(sys.modules, MODULES[protocol].rpartition(".")[0], None)
    package = MODULES[protocol].removesuffix(".trace_exporter").replace(".", "-")
    assert PACKAGES[protocol] in (ROOT / "router" / "pyproject.toml").read_text(encoding="utf-8")
    with pytest.raises(StartupError, match=f"pip install opentelemetry-sdk {package},"):
        check_traces(config_of(protocol))
    check_traces(config_of(protocol, endpoint=None))


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(StartupError, match="http/json is not one of grpc, http/protobuf"):
        check_traces(config_of())
