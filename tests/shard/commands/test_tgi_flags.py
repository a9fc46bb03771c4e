"""The shard accepts the arguments that TGI's launcher passes to `text-generation-server`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_shard.commands import download_weights
from millrace_shard.commands.composition import with_folders
from millrace_shard.commands.serve import WITHOUT_EFFECT, notices
from millrace_shard.config import ShardConfig
from millrace_shard.weights.hub import HubError
from millrace_testing.models import fake_hub
from millrace_testing.models.fake_hub import COMMIT, REPO, Hub

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
SERVE = (
    "org/model --uds-path /s/tgi --logger-level WARN --json-output --trust-remote-code --sharded --quantize awq"
    " --speculate 3 --dtype bfloat16 --kv-cache-dtype fp8_e5m2 --revision v1 --otlp-endpoint http://traces:4317"
    " --otlp-service-name tgi.server --max-input-tokens 100"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def restored_log() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_the_command_line_of_tgis_launcher_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    config = ShardConfig.from_args(SERVE.split())
    assert (str(config.model_folder), config.revision) == ("org/model", "v1")
    assert (config.rank, config.world_size, config.master_port) == (1, 2, 29501)
    assert str(config.socket_path) == "/s/tgi-1"
    assert (config.threshold, config.json_output) == ("warning", True)
    assert (config.quantize, config.speculate, config.dtype) == ("awq", 3, "bfloat16")
    assert config.kv_cache_dtype == "fp8_e5m2"
    assert [line.split()[0] for line in notices(config)] == [
        "--" + name.replace("_", "-") for name in WITHOUT_EFFECT
    ]


@pytest.mark.parametrize("missing", GROUP)
def test_sharded_needs_the_place_in_the_group(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(SystemExit) as exit_:
        ShardConfig.from_args(["m", "--sharded"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    # Rank 1 of a group of one is refused for another reason as well.
    assert f"{missing} must be set when sharded is True" in error


def test_nothing_is_said_of_flags_that_were_not_given() -> None:
    assert not list(notices(ShardConfig.from_args(["m"])))


def test_a_name_on_the_hub_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub.serve(Hub(FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        config = with_folders(ShardConfig.from_args([REPO, "--revision=main"]))
    assert config.model_folder == cache / f"models--org--model/snapshots/{COMMIT}"
    assert config.draft_model is None
    # It is there now.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert with_folders(ShardConfig.from_args([REPO])).model_folder == config.model_folder


def test_neither_folder_nor_name(cache: Path) -> None:
    with pytest.raises(HubError, match="folder /no/such/model does not exist"):
        with_folders(ShardConfig.from_args(["/no/such/model"]))


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    config = ShardConfig.from_args([str(tmp_path)])
    assert with_folders(config) is config


@pytest.mark.usefixtures("cache", "restored_log")
def test_tgis_download_flags_are_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--extension .bin --logger-level INFO --json-output --trust-remote-code --merge-lora --auto-convert"
    with fake_hub.serve(Hub(FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert download_weights.main([REPO, *flags.split()]) == 0
        loud = capsys.readouterr().out.splitlines()
        quiet = flags.replace("INFO", "ERROR")
        assert download_weights.main([REPO, *quiet.split(), "--no-auto-convert"]) == 0
    said = [json.loads(line)["fields"]["message"] for line in loud[:-1]]
    for flag in ("--extension", "--trust-remote-code", "--merge-lora", "--auto-convert"):
        assert any(message.startswith(f"{flag} has no effect") for message in said)
    assert capsys.readouterr().out.splitlines() == [loud[-1]]
