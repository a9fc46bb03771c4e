"""Names of models and draft models become folders, against a hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace_shard.commands.composition import with_folders
from millrace_shard.config import ShardConfig
from millrace_shard.errors import ModelError
from millrace_shard.speculation.checkpoints import Checkpoints, find_draft
from millrace_shard.weights.download import HubAccess
from millrace_shard.weights.hub import HubError, HubSettings
from millrace_testing.models import fake_hub
from millrace_testing.models.fake_hub import REPO, Hub

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
}


def medusa(base: str) -> dict[str, bytes]:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": base}
    return {
        "config.json": json.dumps(config).encode(),
        "medusa_lm_head.safetensors": b"heads",
        "medusa_lm_head.pt": b"pickle",
    }


def settings(folder: Path, hub: Hub | None = None, *, offline: bool = False) -> HubSettings:
    access = HubAccess(
        endpoint=hub.endpoint if hub else "http://127.0.0.1:1",
        token=None,
        cache=folder / "hub",
        wait=lambda _: None,
    )
    return HubSettings(access, offline=offline, side_root=folder / "side")


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def find(model_id: str, found: HubSettings, draft_model: str | None = None) -> Checkpoints:
    return Checkpoints.find(model_id, draft_model=draft_model, revision=None, settings=found)


def test_a_model_without_a_draft_is_resolved(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", MODEL)
    assert find(str(folder), settings(tmp_path)) == Checkpoints(folder)


def test_a_draft_is_downloaded_from_the_hub(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", MODEL)
    with fake_hub.serve(Hub(MODEL)) as hub:
        result = find(str(folder), settings(tmp_path, hub), REPO)
    assert result.model == folder
    assert result.draft is not None
    assert (result.draft / "model.safetensors").read_bytes() == b"weights"
    offline = settings(tmp_path, offline=True)
    assert find_draft(REPO, offline) == result.draft


def test_medusa_heads_bring_their_model_along(tmp_path: Path) -> None:
    base = write(tmp_path / "base", MODEL)
    with fake_hub.serve(Hub(medusa(str(base)))) as hub:
        result = find(REPO, settings(tmp_path, hub))
        hub.requests.clear()
        assert find(REPO, settings(tmp_path, hub)) == result
        assert hub.requests == []
    assert result.model == base
    assert result.draft is not None
    assert {path.name for path in result.draft.iterdir()} == {
        "config.json",
        "medusa_lm_head.safetensors",
    }


def test_the_model_of_medusa_heads_comes_from_the_hub(tmp_path: Path) -> None:
    heads = write(tmp_path / "heads", medusa(REPO))
    with fake_hub.serve(Hub(MODEL)) as hub:
        result = find(str(heads), settings(tmp_path, hub))
    assert result.draft == heads
    assert (result.model / "model.safetensors").read_bytes() == b"weights"


def test_medusa_heads_as_a_draft_model_keep_the_chosen_model(tmp_path: Path) -> None:
    model = write(tmp_path / "model", MODEL)
    heads = write(tmp_path / "heads", medusa("org/elsewhere"))
    assert find(str(model), settings(tmp_path), str(heads)) == Checkpoints(model, heads)


def test_medusa_heads_and_a_draft_model_are_too_much(tmp_path: Path) -> None:
    heads = write(tmp_path / "heads", medusa(REPO))
    with pytest.raises(HubError, match="start without --draft-model"):
        find(str(heads), settings(tmp_path), "org/draft")


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", MODEL)
    with pytest.raises(ModelError, match="folder /no/such/draft does not exist"):
        find(str(folder), settings(tmp_path), "/no/such/draft")
    with pytest.raises(ModelError, match="org/other is not in the cache"):
        find(str(folder), settings(tmp_path, offline=True), "org/other")


@pytest.mark.parametrize("hub", [Hub({}), Hub(MODEL, hidden=True)], ids=["empty", "hidden"])
def test_a_model_that_cannot_be_had_is_explained(hub: Hub, tmp_path: Path) -> None:
    with fake_hub.serve(hub), pytest.raises(ModelError, match=REPO):
        find(REPO, settings(tmp_path, hub))


def test_medusa_heads_that_are_only_in_a_pickle_are_refused(tmp_path: Path) -> None:
    files = medusa(REPO)
    del files["medusa_lm_head.safetensors"]
    heads = write(tmp_path / "heads", files)
    with pytest.raises(ModelError, match="may run code when read"):
        find(str(heads), settings(tmp_path))


def test_a_shard_resolves_its_draft_model_itself(tmp_path: Path) -> None:
    base, draft = write(tmp_path / "base", MODEL), write(tmp_path / "draft", MODEL)
    config = ShardConfig.from_args([f"--draft-model={draft}", str(base)])
    assert with_folders(config).draft_model == str(draft)
    heads = write(tmp_path / "heads", medusa(str(base)))
    result = with_folders(ShardConfig.from_args([str(heads)]))
    assert (result.model_folder, result.draft_model) == (base, str(heads))
