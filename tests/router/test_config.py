"""Flags with their own parsing."""

from __future__ import annotations

import pytest

from millrace_router.config import RouterConfig, listen_address

ARGV = ["--model-folder=/m"]


def test_the_hostname_stays_what_it_was() -> None:
    assert RouterConfig.from_args([*ARGV, "--hostname=4f2a9c"]).hostname == "4f2a9c"


@pytest.mark.parametrize(
    ("hostname", "address"),
    [("localhost", "127.0.0.1"), ("4f2a9c", "0.0.0.0"), ("::1", "::1"), ("10.0.0.1", "10.0.0.1")],
)
def test_addresses_to_listen_on(hostname: str, address: str) -> None:
    assert listen_address(hostname) == address


@pytest.mark.parametrize(
    ("flags", "variable"), [(["--api-key="], None), (["--api-key", ""], "secret"), ([], "")]
)
def test_an_empty_key_does_not_open_the_server(
    flags: list[str],
    variable: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if variable is not None:
        monkeypatch.setenv("API_KEY", variable)
    with pytest.raises(SystemExit) as caught:
        RouterConfig.from_args([*ARGV, *flags])
    assert caught.value.code == 2
    assert "error: --api-key: " in (message := capsys.readouterr().err)
    assert "is empty; give a key, or unset API_KEY" in message


def test_keys_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RouterConfig.from_args(ARGV).api_key is None
    monkeypatch.setenv("API_KEY", "")
    assert RouterConfig.from_args([*ARGV, "--api-key=a"]).api_key == "a"
    monkeypatch.setenv("API_KEY", "b")
    assert RouterConfig.from_args(ARGV).api_key == "b"


def test_the_port_of_vertex_beats_that_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "80")
    assert RouterConfig.from_args(ARGV).port == 80
    monkeypatch.setenv("AIP_HTTP_PORT", "8080")
    assert RouterConfig.from_args(ARGV).port == 8080
    assert RouterConfig.from_args([*ARGV, "--port=81"]).port == 81
    monkeypatch.delenv("PORT")
    assert RouterConfig.from_args(ARGV).port == 8080


def test_routes_of_vertex(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/endpoints/1/deployedModels/2:predict")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/alive")
    config = RouterConfig.from_args(ARGV)
    assert config.aip_predict_route == "/v1/endpoints/1/deployedModels/2:predict"
    assert config.aip_health_route == "/alive"
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "predict")
    with pytest.raises(SystemExit):
        RouterConfig.from_args(ARGV)
    assert "--aip-predict-route" in capsys.readouterr().err


def test_help_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        RouterConfig.from_args(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--step-timeout" in shown
    words = " ".join(shown.split())
    assert all(f"millrace-router {command}" in words for command in ("replay", "print-schema"))
    assert shown.replace("\n", "").isprintable()
