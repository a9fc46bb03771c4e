"""From a model's name to a local folder, against a hub on this machine."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tokenizers import Tokenizer

from millrace_shard.errors import ModelError
from millrace_shard.variables import Variables
from millrace_shard.weights.download import FIRST_WAIT_SECONDS, TRIES, HubAccess, progress_line
from millrace_shard.weights.hub import HubError, HubSettings, private_folder, resolve
from millrace_testing.models import fake_hub
from millrace_testing.models.fake_hub import COMMIT, REPO, Hub, halfway

INDEX = json.dumps(
    {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX.encode(),
    "model-00001-of-00002.safetensors": bytes(range(256)) * 4096,
    "model-00002-of-00002.safetensors": b"second",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"pickle",
    "original/params.json": b"{}",
    "model.onnx": b"onnx",
    "README.md": b"# Model",
}
NEEDED = set(FILES) - {
    "consolidated.safetensors",
    "pytorch_model.bin",
    "original/params.json",
    "model.onnx",
    "README.md",
}


def settings(
    hub: Hub,
    folder: Path,
    *,
    token: str | None = None,
    offline: bool = False,
    waits: list[float] | None = None,
    needs_weights: bool = True,
) -> HubSettings:
    access = HubAccess(
        endpoint=hub.endpoint,
        token=token,
        cache=folder / "hub",
        wait=(waits if waits is not None else list[float]()).append,
    )
    side = folder / "side"
    return HubSettings(access, offline=offline, side_root=side, needs_weights=needs_weights)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_fresh_download_takes_only_the_files_that_serving_needs(tmp_path: Path) -> None:
    with fake_hub.serve(Hub(FILES)) as hub:
        folder = resolve(REPO, revision=None, settings=settings(hub, tmp_path))
    assert folder.name == COMMIT
    assert names(folder) == NEEDED
    assert all((folder / name).read_bytes() == FILES[name] for name in NEEDED)


def test_a_router_whose_ranks_are_elsewhere_needs_no_weights(tmp_path: Path) -> None:
    with fake_hub.serve(Hub(FILES)) as hub:
        alone = settings(hub, tmp_path, needs_weights=False)
        folder = resolve(REPO, revision=None, settings=alone)
        assert folder.name == COMMIT
        assert names(folder) == {name for name in NEEDED if not name.startswith("model-0")}
        hub.requests.clear()
        assert resolve(REPO, revision=None, settings=alone) == folder
        assert hub.requests == []
        # A shard on this host gets the rest.
        assert resolve(REPO, revision=None, settings=settings(hub, tmp_path)) == folder
    assert names(folder) == NEEDED
    local = tmp_path / "local"
    local.mkdir()
    (local / "config.json").write_bytes(FILES["config.json"])
    with pytest.raises(HubError, match=r"has no tokenizer\.json$"):
        resolve(str(local), revision=None, settings=alone)
    (local / "tokenizer.json").write_bytes(b"{}")
    assert resolve(str(local), revision=None, settings=alone) == local


def test_second_run_sends_no_request(tmp_path: Path) -> None:
    with fake_hub.serve(Hub(FILES)) as hub:
        first = resolve(REPO, revision=None, settings=settings(hub, tmp_path))
        hub.requests.clear()
        again = resolve(REPO, revision=None, settings=settings(hub, tmp_path))
        offline = resolve(REPO, revision=COMMIT, settings=settings(hub, tmp_path, offline=True))
        assert hub.requests == []
    assert first == again == offline


def test_only_the_missing_weight_file_is_fetched(tmp_path: Path) -> None:
    with fake_hub.serve(Hub(FILES)) as hub:
        folder = resolve(REPO, revision=None, settings=settings(hub, tmp_path))
        (folder / "model-00002-of-00002.safetensors").resolve().unlink()
        (folder / "model-00002-of-00002.safetensors").unlink()
        hub.requests.clear()
        assert resolve(REPO, revision=None, settings=settings(hub, tmp_path)) == folder
        fetched = [
            request
            for request in hub.requests
            if request.startswith("GET") and "/resolve/" in request
        ]
    assert [request.rpartition("/")[2] for request in fetched] == [
        "model-00002-of-00002.safetensors"
    ]


def test_dropped_connection_is_resumed_where_it_broke(tmp_path: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    # Longer than the pieces the client writes.
    files = {**FILES, name: bytes(range(256)) * 100_000}
    with fake_hub.serve(Hub(files, drop_after={name: 20_000_000})) as hub:
        folder = resolve(REPO, revision=None, settings=settings(hub, tmp_path))
    assert (folder / name).read_bytes() == files[name]
    assert len(hub.ranges) == 1
    assert 0 < int(hub.ranges[0].removeprefix(f"{name} bytes=").rstrip("-")) <= 20_000_000


def test_passing_failures_are_retried_with_growing_waits(tmp_path: Path) -> None:
    waits: list[float] = []
    with fake_hub.serve(Hub(FILES, failures=[500, 503])) as hub:
        folder = resolve(REPO, revision=None, settings=settings(hub, tmp_path, waits=waits))
    assert names(folder) == NEEDED
    assert waits == [FIRST_WAIT_SECONDS, 2 * FIRST_WAIT_SECONDS]


def test_a_lasting_failure_is_reported_with_the_remedy(tmp_path: Path) -> None:
    waits: list[float] = []
    with (
        fake_hub.serve(Hub(FILES, failures=[500] * TRIES)) as hub,
        pytest.raises(HubError, match=r"could not be downloaded .* start again to resume it"),
    ):
        resolve(REPO, revision=None, settings=settings(hub, tmp_path, waits=waits))
    assert len(waits) == TRIES - 1


def test_missing_repository_is_not_retried(tmp_path: Path) -> None:
    waits: list[float] = []
    with (
        fake_hub.serve(Hub(FILES, hidden=True)) as hub,
        pytest.raises(HubError, match=f"model {REPO} does not exist .* private: set HF_TOKEN"),
    ):
        resolve(REPO, revision=None, settings=settings(hub, tmp_path, waits=waits))
    assert waits == []


def test_gated_repository_names_the_terms_and_the_token(tmp_path: Path) -> None:
    with fake_hub.serve(Hub(FILES, token="hf_right")) as hub:
        with pytest.raises(HubError, match=r"is gated: accept its terms .* set HF_TOKEN"):
            resolve(REPO, revision=None, settings=settings(hub, tmp_path))
        with pytest.raises(HubError, match="check HF_TOKEN's rights"):
            resolve(REPO, revision=None, settings=settings(hub, tmp_path, token="hf_wrong"))
        folder = resolve(REPO, revision=None, settings=settings(hub, tmp_path, token="hf_right"))
    assert names(folder) == NEEDED


def test_unknown_revision_is_named(tmp_path: Path) -> None:
    with (
        fake_hub.serve(Hub(FILES)) as hub,
        pytest.raises(HubError, match=f"revision v9 of {REPO} does not exist"),
    ):
        resolve(REPO, revision="v9", settings=settings(hub, tmp_path))


def test_offline_miss_names_the_folder_looked_in(tmp_path: Path) -> None:
    with (
        fake_hub.serve(Hub(FILES)) as hub,
        pytest.raises(HubError, match=f"{tmp_path}/hub; HF_HUB_OFFLINE"),
    ):
        resolve(REPO, revision=None, settings=settings(hub, tmp_path, offline=True))


def test_models_that_are_only_pickles_are_refused_with_the_conversion(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"x"}
    with (
        fake_hub.serve(Hub(files)) as hub,
        pytest.raises(
            HubError,
            match=r"pickle files \(pytorch_model.bin\).*; safetensors and .*millrace-shard convert",
        ),
    ):
        resolve(REPO, revision=None, settings=settings(hub, tmp_path))
    local = tmp_path / "local"
    local.mkdir()
    for name, body in files.items():
        (local / name).write_bytes(body)
    with pytest.raises(HubError, match=f"millrace-shard convert {local}"):
        resolve(str(local), revision=None, settings=settings(hub, tmp_path))
    assert not any("pytorch_model" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "whisper", "is_encoder_decoder": True}, "'whisper' has an encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' has an encoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "'bert' only encodes"),
        ({"model_type": "modernbert"}, "'modernbert' only encodes"),
    ],
)
def test_encoders_are_refused_as_such_whatever_their_weights_are(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}"}
    for weights in ("pytorch_model.bin", "model.safetensors"):
        folder = tmp_path / weights
        folder.mkdir()
        for name, body in (files | {weights: b"x"}).items():
            (folder / name).write_bytes(body)
        with (
            fake_hub.serve(Hub(files | {weights: b"x"})) as hub,
            pytest.raises(ModelError, match=f"{message}, and only decoders are served"),
        ):
            resolve(REPO, revision=None, settings=settings(hub, tmp_path))
        with pytest.raises(ModelError, match=f"{message}, and only decoders are served"):
            resolve(str(folder), revision=None, settings=settings(Hub({}), tmp_path))
        assert not any(weights in request for request in hub.requests)


def test_whole_weights_beat_an_index_of_parts(tmp_path: Path) -> None:
    """As in transformers: the index is left from before a merge."""
    files = {name: body for name, body in FILES.items() if "-of-" not in name}
    files["model.safetensors"] = b"whole"
    with fake_hub.serve(Hub(files)) as hub:
        folder = resolve(REPO, revision=None, settings=settings(hub, tmp_path))
        assert (folder / "model.safetensors").read_bytes() == b"whole"
    assert resolve(str(folder), revision=None, settings=settings(Hub({}), tmp_path)) == folder


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    hub = Hub({})
    assert resolve(str(folder), revision=None, settings=settings(hub, tmp_path)) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"has no model\.safetensors"):
        resolve(str(folder), revision=None, settings=settings(hub, tmp_path))
    with pytest.raises(HubError, match=r"folder \./absent does not exist"):
        resolve("./absent", revision=None, settings=settings(hub, tmp_path))


def test_a_missing_tokenizer_json_is_built_for_a_read_only_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4, "mill": 5, "race": 6}
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertLMHeadModel"]}'
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    folder.chmod(0o555)
    chosen = settings(Hub({}), tmp_path)
    result = resolve(str(folder), revision=None, settings=chosen)
    assert result.parent == tmp_path / "side"
    assert (result / "model.safetensors").read_bytes() == b"weights"
    tokenizer = Tokenizer.from_file(str(result / "tokenizer.json"))
    assert tokenizer.encode("mill race", add_special_tokens=False).ids == [5, 6]
    assert not (folder / "tokenizer.json").exists()
    assert resolve(str(folder), revision=None, settings=chosen) == result


def test_progress_reports_bytes_and_seconds_left() -> None:
    mib = 1024 * 1024
    line = progress_line(30 * mib, 100 * mib, new=10 * mib, seconds=5.0)
    assert line == "downloaded 30 of 100 MiB, 35 s left"
    assert progress_line(0, mib, new=0, seconds=5.0) == "downloaded 0 of 1 MiB, waiting for data"


def test_progress_is_logged_while_the_hub_sends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub's client writes a file in pieces of this size, by default 10 MiB.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    large = random.Random(0).randbytes(3_000_000)
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": large}
    caplog.set_level(logging.INFO)
    with halfway() as is_told, fake_hub.serve(Hub(files)) as hub:
        hub.held["model.safetensors"] = is_told
        quick = settings(hub, tmp_path)
        quick = replace(quick, access=replace(quick.access, progress_seconds=0.01))
        folder = resolve(REPO, revision=None, settings=quick)
    assert (folder / "model.safetensors").read_bytes() == large
    assert "downloading 1 weight file, 3 MiB" in caplog.messages
    assert any("downloaded 1 of 3 MiB, " in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("environment", "token", "cache", "offline"),
    [
        ({}, None, "~/.cache/huggingface/hub", False),
        ({"HF_HOME": "/data", "HF_TOKEN": "a", "HF_API_TOKEN": "b"}, "a", "/data/hub", False),
        (
            {"HF_HOME": "/data", "HUGGINGFACE_HUB_CACHE": "/c", "HF_API_TOKEN": "b"},
            "b",
            "/c",
            False,
        ),
        (
            {"HUGGING_FACE_HUB_TOKEN": "t", "HF_HUB_OFFLINE": "1", "HF_TOKEN": ""},
            "t",
            "~/.cache/huggingface/hub",
            True,
        ),
        ({"HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": "/d"}, None, "/d", False),
    ],
)
def test_settings_follow_the_environment(
    environment: dict[str, str],
    token: str | None,
    cache: str,
    offline: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in Variables.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = HubSettings.of(Variables())
    assert result.access.token == token
    assert result.access.cache == Path(cache).expanduser()
    assert result.offline is offline
    assert result.access.endpoint == "https://huggingface.co"


def test_command_prints_the_folder_last_and_no_carriage_return(tmp_path: Path) -> None:
    with fake_hub.serve(Hub(FILES)) as hub:
        done = _download_command(REPO, tmp_path, HF_ENDPOINT=hub.endpoint)
        assert done.returncode == 0, done.stderr
        wrong = _download_command("org/other", tmp_path, HF_ENDPOINT=hub.endpoint)
    *records, last = done.stdout.splitlines()
    assert json.loads(last) == {
        "model_folder": str(tmp_path / f"hub/models--org--model/snapshots/{COMMIT}")
    }
    assert all(json.loads(record)["level"] == "INFO" for record in records)
    loggers = {json.loads(record)["target"].partition(".")[0] for record in records}
    assert loggers == {"millrace_shard"}, "requests are the hub's client's own affair"
    assert any("MiB" in record for record in records)
    assert "\r" not in done.stdout + done.stderr
    assert wrong.returncode == 1
    error = json.loads(wrong.stdout.splitlines()[-1])
    assert error["level"] == "ERROR"
    assert "model org/other does not exist" in error["fields"]["message"]


def _download_command(
    model_id: str, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    code = "import sys; from millrace_shard.commands.download_weights import main; sys.exit(main())"
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", code, model_id, "--json-output"],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_CACHE": str(folder / "hub"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_that_others_can_write_is_refused_for_a_model(tmp_path: Path) -> None:
    path = private_folder(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert private_folder(tmp_path) == path
    for mode in (0o770, 0o702):
        path.chmod(mode)
        with pytest.raises(ModelError, match="can be written by other users"):
            private_folder(tmp_path)
    path.chmod(0o700)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="can be written by other users"):
        private_folder(tmp_path)


def test_another_users_folder_is_refused_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path.stat().st_uid + 1
    (tmp_path / f"millrace-{other}").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: other)
    with pytest.raises(ModelError, match="can be written by other users"):
        private_folder(tmp_path)
