"""Flags with their own parsing."""

from __future__ import annotations

import pytest

from millrace_router.config import (
    AdapterSpec,
    RouterConfig,
    listen_address,
    sglang_adapter,
    split_adapters,
    tgi_adapter,
    vllm_adapter,
)

ARGV = ["--model-folder=/m"]


def test_the_hostname_is_kept_unchanged() -> None:
    assert RouterConfig.from_args([*ARGV, "--hostname=4f2a9c"]).hostname == "4f2a9c"


@pytest.mark.parametrize(
    ("hostname", "address"),
    [("localhost", "127.0.0.1"), ("4f2a9c", "0.0.0.0"), ("::1", "::1"), ("10.0.0.1", "10.0.0.1")],
)
def test_a_hostname_becomes_an_address_to_listen_on(hostname: str, address: str) -> None:
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


def test_the_api_key_is_read_from_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_routes_of_vertex_are_read_and_checked(
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


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("org/a", AdapterSpec(name="org/a", path="org/a")),
        ("org/a@v1", AdapterSpec(name="org/a", path="org/a", revision="v1")),
        ("mine=/models/a", AdapterSpec(name="mine", path="/models/a")),
        ("mine=org/a@v1", AdapterSpec(name="mine", path="org/a", revision="v1")),
        (
            '{"name": "mine", "path": "org/a@b", "revision": "v1", "else": 1}',
            AdapterSpec(name="mine", path="org/a@b", revision="v1"),
        ),
    ],
)
def test_adapters_in_tgis_form_are_read(text: str, spec: AdapterSpec) -> None:
    assert tgi_adapter(text) == spec


@pytest.mark.parametrize(
    "text",
    ["", "a=b=c", "a@b@c", "=b", "a=", "a@", "{", "{}", '{"name": 1, "path": "a"}', '{"name": ""}'],
)
def test_malformed_adapters_are_refused_with_tgis_message(text: str) -> None:
    with pytest.raises(ValueError, match="Invalid LoRA adapter format") as error:
        tgi_adapter(text)
    assert str(error.value) == f"Invalid LoRA adapter format: {text}"


def test_adapters_in_vllms_form_are_read_or_refused() -> None:
    assert vllm_adapter("a=/b=c@d") == AdapterSpec(name="a", path="/b=c@d")
    given = '{"name": "a", "path": "/b", "base_model_name": "base"}'
    assert vllm_adapter(given) == AdapterSpec(name="a", path="/b")
    for text in ("a", "a=", "=b", '{"name": "a"}'):
        with pytest.raises(ValueError, match="Invalid LoRA adapter format"):
            vllm_adapter(text)


def test_adapters_in_sglangs_form_are_read_or_refused() -> None:
    assert sglang_adapter("a=/b=c@d") == AdapterSpec(name="a", path="/b=c@d")
    assert sglang_adapter("org/a") == AdapterSpec(name="org/a", path="org/a")
    given = '{"lora_name": "a", "lora_path": "/b", "pinned": true}'
    assert sglang_adapter(given) == AdapterSpec(name="a", path="/b")
    for text in ("", "a=", "=b", '{"name": "a", "path": "/b"}'):
        with pytest.raises(ValueError, match="Invalid LoRA adapter format"):
            sglang_adapter(text)
    flags = ("--lora-paths=org/a,b=/c", "--max-loras-per-batch=3", "--lora-modules=d=/e")
    config = RouterConfig.from_args([*ARGV, *flags])
    assert [one.name for one in config.registered_adapters] == ["d", "org/a", "b"]
    assert config.max_adapters == 3
    assert RouterConfig.from_args([*ARGV, *flags, "--max-loras=4"]).max_adapters == 4
    with pytest.raises(SystemExit):
        RouterConfig.from_args([*ARGV, "--lora-paths=a="])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b=c", ("a", "b=c")),
        (" a , ,b ", ("a", "b")),
        ('{"name": "a", "path": "b,c"},d=e', ('{"name": "a", "path": "b,c"}', "d=e")),
        (
            '[{"name": "}", "path": "b"}, {"name": "c"}]',
            ('{"name": "}", "path": "b"}', '{"name": "c"}'),
        ),
        ("", ()),
        ('{"name"', ('{"name"',)),
    ],
)
def test_lists_of_adapters_are_split(text: str, parts: tuple[str, ...]) -> None:
    assert split_adapters(text) == parts
    assert split_adapters([text, "z"]) == (*parts, "z")


def test_patterns_of_ids_are_read_or_refused() -> None:
    config = RouterConfig.from_args([*ARGV, "--adapter-allow=hub:org/*,hub:*/lora-*"])
    assert config.adapter_allow == ("hub:org/*", "hub:*/lora-*")
    for pattern in ("org/*", "hub:*", "s3:a/b"):
        with pytest.raises(SystemExit):
            RouterConfig.from_args([*ARGV, f"--adapter-allow={pattern}"])


def test_the_folder_of_adapters_follows_environment_and_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MILLRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(RouterConfig.from_args(ARGV).adapter_cache_folder) == "/xdg/millrace/adapters"
    monkeypatch.setenv("MILLRACE_CACHE", "/millrace")
    assert str(RouterConfig.from_args(ARGV).adapter_cache_folder) == "/millrace/adapters"
    config = RouterConfig.from_args([*ARGV, "--adapter-cache=/own"])
    assert str(config.adapter_cache_folder) == "/own"


def test_an_empty_admin_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        RouterConfig.from_args([*ARGV, "--admin-key="])
    assert "unset ADMIN_KEY" in capsys.readouterr().err


def test_the_model_answers_to_its_served_names_and_its_own_name() -> None:
    config = RouterConfig.from_args([*ARGV, "--served-model-name=a,b"])
    assert config.served_names == ("a", "b")
    assert [config.names_the_model(name) for name in ("a", "b", "m", "c", None)] == [
        *(True, True, True),
        *(False, False),
    ]
    assert RouterConfig.from_args(ARGV).served_names == ("m",)


@pytest.mark.parametrize(("given", "path"), [("", ""), ("/", ""), ("/a/b-1/", "/a/b-1")])
def test_the_path_at_a_proxy_has_no_slash_at_its_end(given: str, path: str) -> None:
    assert RouterConfig.from_args([*ARGV, f"--root-path={given}"]).root_path == path


@pytest.mark.parametrize("given", ["a", "https://x/a", '/"', "/a b"])
def test_an_invalid_path_at_a_proxy_is_refused(given: str) -> None:
    with pytest.raises(SystemExit):
        RouterConfig.from_args([*ARGV, f"--root-path={given}"])


OTEL = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(
    ("flags", "environ", "endpoint", "protocol"),
    [
        (["http://c:4317"], {}, "http://c:4317", "grpc"),
        (["http://c:4318"], {}, "http://c:4318/v1/traces", "http/protobuf"),
        (["http://c:4318/"], {}, "http://c:4318/v1/traces", "http/protobuf"),
        (["https://c/x/v1/traces", "http/protobuf"], {}, "https://c/x/v1/traces", "http/protobuf"),
        (["http://c:4318", "grpc"], {}, "http://c:4318", "grpc"),
        (["c:4317"], {}, "c:4317", "grpc"),
        ([], {"ENDPOINT": "http://e:4318/x"}, "http://e:4318/x/v1/traces", "http/protobuf"),
        ([], {"TRACES_ENDPOINT": "http://e:4318/x"}, "http://e:4318/x", "http/protobuf"),
        ([], {"ENDPOINT": "http://e:1", "PROTOCOL": "grpc"}, "http://e:1", "grpc"),
        (
            ["http://c:1"],
            {"TRACES_ENDPOINT": "http://e:4318", "TRACES_PROTOCOL": "http/protobuf"},
            "http://c:1/v1/traces",
            "http/protobuf",
        ),
    ],
)
def test_traces_go_to_the_endpoint_of_flag_or_environment(
    flags: list[str],
    environ: dict[str, str],
    endpoint: str,
    protocol: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(OTEL + name, value)
    names = ("--otlp-endpoint", "--otlp-protocol")
    given = [f"{name}={value}" for name, value in zip(names, flags, strict=False)]
    target = RouterConfig.from_args([*ARGV, *given]).trace_target
    assert target is not None
    assert (target.endpoint, target.protocol) == (endpoint, protocol)
    assert target.service_name == "text-generation-inference.router"


def test_traces_are_off_by_default_and_where_opentelemetry_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert RouterConfig.from_args(ARGV).trace_target is None
    monkeypatch.setenv(OTEL + "ENDPOINT", "http://e")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert RouterConfig.from_args(ARGV).trace_target is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert RouterConfig.from_args([*ARGV, "--otlp-endpoint=http://c"]).trace_target is None


def test_the_service_name_comes_from_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mill")
    flags = [*ARGV, "--otlp-endpoint=http://c"]
    for more, name in (([], "mill"), (["--otlp-service-name=x"], "x")):
        target = RouterConfig.from_args([*flags, *more]).trace_target
        assert target is not None
        assert target.service_name == name
