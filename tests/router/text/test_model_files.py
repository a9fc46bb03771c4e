"""Reading a model folder's small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace_router.config import RouterConfig
from millrace_router.start.files import with_model_folder
from millrace_router.start.running import start
from millrace_router.start.shards import StartupError
from millrace_router.text.model_files import ModelFiles, ModelFilesError, find_snapshot


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    files = ModelFiles.load(tmp_path)
    assert files == ModelFiles()
    assert files.model_type is None
    assert files.special_tokens == {}
    assert files.chat_template is None


def test_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "llama"})
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, 2]})
    files = ModelFiles.load(tmp_path)
    assert files.model_type == "llama"
    assert files.generation_config == {"eos_token_id": [1, 2]}


def test_special_tokens_are_strings_or_objects(tmp_path: Path) -> None:
    tokens = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
    }
    write(tmp_path, "tokenizer_config.json", tokens)
    assert ModelFiles.load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_templates_are_taken_in_order(tmp_path: Path) -> None:
    def found() -> str | None:
        return ModelFiles.load(tmp_path).chat_template

    write(tmp_path, "processor_config.json", {"chat_template": "processor"})
    assert found() == "processor"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert found() == "config"
    write(tmp_path, "chat_template.jinja", "jinja file\n")
    assert found() == "jinja file\n"
    write(tmp_path, "chat_template.json", {"chat_template": "json file"})
    assert found() == "json file"


def test_a_chosen_config_replaces_the_folder_s(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config", "bos_token": "<a>"})
    write(tmp_path, "chat_template.jinja", "jinja file")
    chosen = write(tmp_path, "other.json", {"chat_template": "chosen", "bos_token": "<b>"})
    files = ModelFiles.load(tmp_path, tokenizer_config_path=chosen)
    assert files.chat_template == "chosen"
    assert files.special_tokens == {"bos_token": "<b>"}
    chosen.write_text("{}")
    assert ModelFiles.load(tmp_path, tokenizer_config_path=chosen).chat_template == "jinja file"


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NAMED, ("d", "t")),
        ([*NAMED, {"name": "rag", "template": "r"}], ("d", "t")),
        ({"default": "d", "tool_use": "t"}, ("d", "t")),
        (NAMED[:1], (None, "t")),
        ([{"name": [], "template": {}}, 3], (None, None)),
        ("d", ("d", None)),
        (None, (None, None)),
        (17, (None, None)),
    ],
    ids=str,
)
def test_named_templates(
    tmp_path: Path, template: object, expected: tuple[str | None, str | None]
) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": template})
    files = ModelFiles.load(tmp_path)
    assert (files.chat_template, files.tool_template) == expected


def test_separate_template_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "tools")
    write(tmp_path, "additional_chat_templates/rag.jinja", "documents")
    write(tmp_path, "tokenizer_config.json", {"chat_template": NAMED})
    files = ModelFiles.load(tmp_path)
    assert (files.chat_template, files.tool_template) == ("d", "tools")
    write(tmp_path, "chat_template.jinja", "default")
    files = ModelFiles.load(tmp_path)
    assert (files.chat_template, files.tool_template) == ("default", "tools")


def test_a_chosen_template_is_the_one_for_tools_too(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": NAMED})
    chosen = write(tmp_path, "other.json", {"chat_template": "chosen"})
    files = ModelFiles.load(tmp_path, tokenizer_config_path=chosen)
    assert (files.chat_template, files.tool_template) == ("chosen", None)
    write(tmp_path, "other.json", {"chat_template": [{"name": "tool_use", "template": "mine"}]})
    files = ModelFiles.load(tmp_path, tokenizer_config_path=chosen)
    assert (files.chat_template, files.tool_template) == (None, "mine")


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_malformed_files_are_named(tmp_path: Path, content: str) -> None:
    write(tmp_path, "config.json", content)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        ModelFiles.load(tmp_path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFilesError, match=r"chat_template\.jinja cannot be read"):
        ModelFiles.load(tmp_path)
    with pytest.raises(ModelFilesError, match="does not exist"):
        ModelFiles.load(tmp_path, tokenizer_config_path=tmp_path / "none.json")


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
def test_the_cache_folder_follows_the_hubs_variables(
    variables: dict[str, str], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert RouterConfig.from_args(["--model-folder=m"]).hub_cache == Path(cache).expanduser()
