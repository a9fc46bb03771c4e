"""A model's name to its folder in the hub's local cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace_router.config import RouterConfig
from millrace_router.start.files import with_model_folder
from millrace_router.start.running import start
from millrace_router.start.shards import StartupError
from millrace_router.text.hub_cache import find_snapshot
from millrace_router.text.model_files import ModelFilesError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two commits of org/model, of which main and refs/pr/1 are names, as the hub's client lays them out."""
    model = tmp_path / "hub" / "models--org--model"
    for commit in (COMMIT, OTHER):
        (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs" / "refs" / "pr").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "refs" / "refs" / "pr" / "1").write_text(f"{OTHER}\n")
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("revision", "commit"),
    [(None, COMMIT), ("main", COMMIT), ("refs/pr/1", OTHER), (OTHER, OTHER)],
)
def test_a_snapshot_is_found(cache: Path, revision: str | None, commit: str) -> None:
    found = find_snapshot("org/model", revision=revision, cache=cache)
    assert found == cache / "models--org--model" / "snapshots" / commit


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("org/model", "v9"),
        ("org/other", None),
        ("model", None),
        ("a/b/c", None),
        ("/nowhere", None),
        ("..", None),
    ],
)
def test_the_remedy_is_named(cache: Path, name: str, revision: str | None) -> None:
    with pytest.raises(ModelFilesError) as caught:
        find_snapshot(name, revision=revision, cache=cache)
    assert f"download-weights {name}" in str(caught.value)
    assert str(cache) in str(caught.value)
    assert ("at revision v9" in str(caught.value)) == (revision == "v9")


def test_the_router_takes_a_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    config = with_model_folder(RouterConfig.from_args(["--tokenizer-name=org/model"]))
    assert config.model_folder == cache / "models--org--model" / "snapshots" / COMMIT
    assert (config.model_id, config.revision) == ("org/model", COMMIT)


def test_the_router_takes_folders_as_they_are(tmp_path: Path) -> None:
    for flag in ("--tokenizer-name", "--model-folder"):
        config = RouterConfig.from_args([f"{flag}={tmp_path}"])
        assert with_model_folder(config) is config


async def test_a_name_that_is_not_there_ends_the_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(cache))
    with pytest.raises(StartupError, match="org/absent is neither a folder nor"):
        await start(RouterConfig.from_args(["--tokenizer-name=org/absent"]))


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/c"}, "/c"),
        ({"HF_HUB_CACHE": "/d", "HUGGINGFACE_HUB_CACHE": "/c"}, "/d"),
    ],
)
def test_variables_of_the_cache(
    variables: dict[str, str], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert RouterConfig.from_args(["--model-folder=m"]).hub_cache == Path(cache).expanduser()
