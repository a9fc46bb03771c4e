"""docs/operate.md and docs/kubernetes.md link to the files in deploy/, which fit the programs, and sizes are right."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from millrace_launcher.settings.arguments import Settings, read_settings
from millrace_launcher.supervision.launcher import EXIT_MARGIN_SECONDS
from millrace_router.app import OPEN_PATHS
from millrace_router.config import RouterConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "operate.md").read_text()
FILES = sorted(
    str(path.relative_to(ROOT))
    for room in ("nginx", "haproxy", "systemd", "kubernetes", "envoy")
    for path in (DEPLOY / room).iterdir()
)
DRAIN_SECONDS = (
    RouterConfig.model_fields["graceful_termination_timeout"].default + EXIT_MARGIN_SECONDS
)
KV_TOKENS = 32 * 2048
BYTES = 2
GB = 1e9
MODELS = {
    "Llama 3.2 1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "Llama 3.1 8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Llama 3.1 70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}
"""The published shapes."""


def test_the_pages_link_to_every_file() -> None:
    pages = PAGE + (ROOT / "docs" / "kubernetes.md").read_text()
    assert [name for name in FILES if f"](../{name})" not in pages] == []


class Unit(configparser.ConfigParser):
    """A unit's sections; its keys keep their case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit() -> Unit:
    parsed = Unit(interpolation=None)
    parsed.read(DEPLOY / "systemd" / "millrace.service")
    return parsed


def pod() -> dict[str, Any]:
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes" / "millrace.yml").read_text())
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def unit_settings() -> Settings:
    program, *arguments = shlex.split(unit()["Service"]["ExecStart"])
    assert program.endswith("/.venv/bin/millrace-launcher")
    return read_settings(arguments, {})


def pod_settings() -> Settings:
    (container,) = pod()["containers"]
    environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return read_settings(container["args"], environment)


def test_the_unit_listens_at_the_address_that_the_proxies_use() -> None:
    settings = unit_settings()
    assert (settings.router.hostname, settings.router.port) == ("127.0.0.1", 3000)
    for name in ("nginx/millrace.conf", "haproxy/haproxy.cfg"):
        assert "127.0.0.1:3000" in (DEPLOY / name).read_text()


def test_nginx_takes_the_largest_body_that_the_router_takes() -> None:
    (size,) = re.findall(
        r"client_max_body_size (\d+)m;", (DEPLOY / "nginx/millrace.conf").read_text()
    )
    assert int(size) << 20 >= RouterConfig.model_fields["payload_limit"].default


def test_streams_have_time_to_drain() -> None:
    assert int(unit()["Service"]["TimeoutStopSec"]) > DRAIN_SECONDS
    (container,) = pod()["containers"]
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert pod()["terminationGracePeriodSeconds"] > int(seconds) + DRAIN_SECONDS


def test_probes_ask_open_routes_at_the_port_of_the_server() -> None:
    (container,) = pod()["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == pod_settings().router.port
    _, service = yaml.safe_load_all((DEPLOY / "kubernetes" / "millrace.yml").read_text())
    probes = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/livez",
        "liveness": "/health",
        "readiness": "/readyz",
    }
    assert {probe["path"] for probe in probes.values()} <= OPEN_PATHS
    targets = {probe["port"] for probe in probes.values()}
    assert targets | {service["spec"]["ports"][0]["targetPort"]} == {port["name"]}


def test_the_pod_has_memory_for_its_model() -> None:
    kv = pod_settings().shard.kv_memory
    assert kv is not None
    config = MODELS["Llama 3.2 1B"]
    needed = (
        sum(sizes(config)[part] for part in ("weights", "embedding again", "the rest")) + kv / GB
    )
    (container,) = pod()["containers"]
    limit = container["resources"]["limits"]["memory"]
    assert needed * GB < int(limit.removesuffix("Gi")) << 30


def sizes(config: LlamaConfig) -> dict[str, float]:
    """The figures of the page, in its units, from a model of `transformers` without memory."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    layer = model.model.layers[0].self_attn
    # Keys and values of all layers.
    token = (
        (layer.k_proj.out_features + layer.v_proj.out_features) * config.num_hidden_layers * BYTES
    )
    is_tied = config.tie_word_embeddings
    found = {
        "parameters": parameters / 1e6,
        "weights": parameters * BYTES / GB,
        "embedding again": embedding * BYTES / GB if is_tied else 0.0,
        "KV of one token": token / 1024,
        "KV cache": token * KV_TOKENS / GB,
        "the rest": 0.6 + 0.3,
    }
    found["in all"] = sum(
        found[part] for part in ("weights", "embedding again", "KV cache", "the rest")
    )
    read = parameters - (0 if is_tied else embedding)
    found["least time of a token at 100 GB/s"] = read * BYTES / 100e9 * 1000
    return found


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, float]]:
    """The numbers of the page by model and row."""
    head, _, *rows = re.findall(r"^\|.*Llama(?:.*\n\|)+.*", PAGE, re.MULTILINE)[0].splitlines()
    names = [name.strip() for name in head.split("|")[2:-1]]
    numbers: dict[str, dict[str, float]] = {name: {} for name in names}
    for row in rows:
        title, *cells = (cell.replace("*", "").strip() for cell in row.strip("|").split("|"))
        if "layers" not in title:
            for name, cell in zip(names, cells, strict=True):
                numbers[name][re.sub(r", \w+$", "", title)] = float(cell.replace(",", ""))
    return numbers


@pytest.mark.parametrize("model", MODELS)
def test_sizes_on_the_page_match_the_formulas(
    model: str, table: dict[str, dict[str, float]]
) -> None:
    expected = sizes(MODELS[model])
    assert table[model].keys() == expected.keys()
    for title, said in table[model].items():
        digits = len(f"{said:g}".partition(".")[2])
        step = 10.0 if title.startswith("least time") and said > 1000 else 10.0**-digits
        assert abs(said - expected[title]) <= step / 2 + 1e-9, (title, said, expected[title])
