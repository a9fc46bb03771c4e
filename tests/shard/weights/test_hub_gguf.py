"""GGUF files of a repository on the hub, chosen by llama.cpp's rule, against a hub on this machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from millrace_shard.speculation.checkpoints import Checkpoints
from millrace_shard.vision.registry import read_vision
from millrace_shard.weights import download
from millrace_shard.weights.download import HubAccess
from millrace_shard.weights.gguf.file_names import best_mmproj, chosen, tags
from millrace_shard.weights.hub import HubError, HubSettings, resolve
from millrace_testing.models import fake_hub
from millrace_testing.models.fake_hub import COMMIT, REPO, Hub
from millrace_testing.models.gguf_files import TinyGguf
from millrace_testing.models.mmproj_files import TinyPair


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository as publishers fill it: two types at the top, a split one in a folder, and no config.json."""
    folder = tmp_path_factory.mktemp("repository")
    for kind in ("Q4_0", "Q8_0"):
        TinyGguf("llama", kind).write(folder / f"m-{kind}.gguf")
    (folder / "BF16").mkdir()
    TinyGguf("llama", "BF16").write(folder / "BF16" / "m-BF16.gguf", per_part=11)
    written = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return written | {"README.md": b"# Model", "imatrix-m.gguf": b"statistics"}


def settings(
    hub: Hub, folder: Path, *, token: str | None = None, offline: bool = False
) -> HubSettings:
    access = HubAccess(
        endpoint=hub.endpoint, token=token, cache=folder / "hub", wait=lambda _: None
    )
    return HubSettings(access, offline=offline, side_root=folder / "side")


def served(model_id: str, hub: Hub, folder: Path, *, offline: bool = False) -> str:
    """The name in the repository of the file that is served."""
    prepared = resolve(model_id, revision=None, settings=settings(hub, folder, offline=offline))
    blob = (prepared / "model.gguf").resolve()
    snapshot = folder / f"hub/models--org--model/snapshots/{COMMIT}"
    return next(
        str(path.relative_to(snapshot))
        for path in snapshot.rglob("*.gguf")
        if path.resolve() == blob
    )


def fetched(hub: Hub) -> set[str]:
    gets = (name for name in hub.requests if name.startswith("GET") and "/resolve/" in name)
    return {name.partition("/resolve/")[2].partition("/")[2] for name in gets}


def test_a_type_names_the_file_and_only_that_is_fetched(
    files: Mapping[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_hub.serve(Hub(files)) as hub, caplog.at_level(logging.INFO):
        assert served(f"{REPO}:q4_0", hub, tmp_path) == "m-Q4_0.gguf"
        assert fetched(hub) == {"m-Q4_0.gguf"}
        assert (
            f"{REPO}: serving m-Q4_0.gguf; {REPO}:TAG chooses another one, TAG being one of BF16, Q8_0"
            in caplog.messages
        )
        assert any(text.startswith("imatrix-m.gguf is left aside") for text in caplog.messages)
        hub.requests.clear()
        assert served(f"{REPO}:Q4_0", hub, tmp_path) == "m-Q4_0.gguf"
        assert served(f"{REPO}:Q4_0", hub, tmp_path, offline=True) == "m-Q4_0.gguf"
        assert hub.requests == []


def test_a_repository_of_gguf_files_is_served_by_its_name(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    with fake_hub.serve(Hub(files)) as hub:
        served(f"{REPO}:Q4_0", hub, tmp_path)
        # What the cache has does not decide: the rule is for the files of the hub.
        assert served(REPO, hub, tmp_path) == "m-Q8_0.gguf"
        assert fetched(hub) == {"m-Q4_0.gguf", "m-Q8_0.gguf"}
        hub.requests.clear()
        assert served(REPO, hub, tmp_path, offline=True) == "m-Q8_0.gguf"
        assert hub.requests == []


def test_all_parts_of_a_split_file_are_fetched(files: Mapping[str, bytes], tmp_path: Path) -> None:
    parts = {f"BF16/m-BF16-0000{number}-of-00002.gguf" for number in (1, 2)}
    with fake_hub.serve(Hub(files)) as hub:
        assert served(f"{REPO}:BF16", hub, tmp_path) == min(parts)
        assert fetched(hub) == parts
        (tmp_path / f"hub/models--org--model/snapshots/{COMMIT}" / max(parts)).unlink()
        with pytest.raises(HubError, match="model:BF16 is not in the cache"):
            served(f"{REPO}:BF16", hub, tmp_path, offline=True)
        hub.files = {name: body for name, body in files.items() if name != max(parts)}
        with pytest.raises(HubError, match=r"is incomplete: it has no BF16/m-BF16-00002-of-00002"):
            served(f"{REPO}:BF16", hub, tmp_path)


def test_a_type_that_no_file_has_names_those_that_exist(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    message = "no GGUF file is of the type Q5_K_M; these are there: BF16, Q4_0, Q8_0$"
    with fake_hub.serve(Hub(files)) as hub:
        with pytest.raises(HubError, match=message):
            resolve(f"{REPO}:Q5_K_M", revision=None, settings=settings(hub, tmp_path))
        hub.files = {"config.json": b"{}", "model.safetensors": b"weights"}
        with pytest.raises(HubError, match="it has no GGUF files, so leave :Q5_K_M out"):
            resolve(f"{REPO}:Q5_K_M", revision=None, settings=settings(hub, tmp_path))


def test_safetensors_come_before_gguf_files_without_a_type(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    small = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"weights"}
    with fake_hub.serve(Hub({**files, **small})) as hub:
        served(f"{REPO}:Q4_0", hub, tmp_path)
        folder = resolve(REPO, revision=None, settings=settings(hub, tmp_path))
        assert fetched(hub) == {"m-Q4_0.gguf", *small}
    assert folder.name == COMMIT
    assert (folder / "model.safetensors").is_file()


def test_a_hub_that_cannot_be_reached_leaves_the_files_of_the_cache(
    files: Mapping[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_hub.serve(Hub(files)) as hub:
        assert served(REPO, hub, tmp_path) == "m-Q8_0.gguf"
    download.check_connection.cache_clear()
    assert served(REPO, hub, tmp_path) == "m-Q8_0.gguf"
    assert any("which is in the cache" in text for text in caplog.messages)
    with pytest.raises(HubError, match="cannot be reached"):
        served(f"{REPO}:BF16", hub, tmp_path)


def test_a_start_without_a_type_finds_gguf_files_and_says_what_else_is_there(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    with fake_hub.serve(Hub(files)) as hub:
        known = settings(hub, tmp_path)
        model = Checkpoints.find(REPO, draft_model=None, revision=None, settings=known).model
        assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
        hub.files = {"mmproj-m.gguf": b"GGUF"}
        other = settings(hub, tmp_path / "other")
        with pytest.raises(HubError) as refused:
            Checkpoints.find("org/other", draft_model=None, revision=None, settings=other)
        assert "404" not in str(refused.value)


def test_revision_and_token_are_those_of_other_models(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    name = f"{REPO}:Q4_0"
    with fake_hub.serve(Hub(files, token="secret")) as hub:
        with pytest.raises(HubError, match="is gated: accept its terms"):
            resolve(name, revision=None, settings=settings(hub, tmp_path))
        known = settings(hub, tmp_path, token="secret")
        with pytest.raises(HubError, match="revision v9 of org/model does not exist"):
            resolve(name, revision="v9", settings=known)
        folder = resolve(name, revision=COMMIT, settings=known)
    # The launcher reads the commit from the name.
    assert folder.name.endswith(f"-{COMMIT}")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_drafts_and_tokenizers_may_be_on_the_hub(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    with fake_hub.serve(Hub(files)) as hub:
        known = settings(hub, tmp_path)
        checkpoints = Checkpoints.find(
            f"{REPO}:Q4_0", draft_model=f"{REPO}:Q8_0", revision=None, settings=known
        )
        assert checkpoints.draft is not None
        assert checkpoints.draft != checkpoints.model
        tokenizer = tmp_path / "tokenizer"
        tokenizer.mkdir()
        (tokenizer / "tokenizer.json").write_bytes(
            (checkpoints.model / "tokenizer.json").read_bytes()
        )
        with_tokenizer = resolve(REPO, revision=None, settings=known, tokenizer=str(tokenizer))
        assert with_tokenizer != checkpoints.draft
        hub.files = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"w"}
        hub.requests.clear()
        with pytest.raises(HubError, match=r"--tokenizer-name=.* is for GGUF files only"):
            resolve(REPO, revision=None, settings=known, tokenizer=str(tokenizer))
        assert "model.safetensors" not in fetched(hub)


def test_a_folder_in_place_of_the_cache_has_the_type(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        (folder / f"m-{kind}.gguf").write_bytes(files[f"m-{kind}.gguf"])
    access = HubAccess(endpoint="http://127.0.0.1:9", token=None, cache=tmp_path / "hub")
    known = HubSettings(access, offline=True, side_root=tmp_path, weights_override=folder)
    prepared = resolve(f"{REPO}:Q8_0", revision=None, settings=known)
    assert (prepared / "model.gguf").resolve() == folder / "m-Q8_0.gguf"
    with pytest.raises(HubError, match="type Q6_K; these are there: Q4_0, Q8_0"):
        resolve(f"{REPO}:Q6_K", revision=None, settings=known)


def test_the_file_that_reads_images_is_fetched_with_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, encoder = (
        path.read_bytes() for path in TinyPair("idefics3", tmp_path / "hf").write(tmp_path / "m")
    )
    repository = {"BF16/m-BF16.gguf": text, "README.md": b"# Model"}
    for kind in ("F16", "F32"):
        repository[f"mmproj-m-{kind}.gguf"] = encoder
    with fake_hub.serve(Hub(repository)) as hub, caplog.at_level(logging.INFO):
        known = settings(hub, tmp_path)
        bare = resolve(REPO, revision=None, settings=known, mmproj="off")
        assert fetched(hub) == {"BF16/m-BF16.gguf"}
        assert not (bare / "mmproj.gguf").exists()
        folder = resolve(REPO, revision=None, settings=known)
        assert fetched(hub) == {"BF16/m-BF16.gguf", "mmproj-m-F16.gguf"}
        hub.requests.clear()
        resolve(f"{REPO}:BF16", revision=None, settings=settings(hub, tmp_path / "new"))
        downloads = [each for each in hub.requests if each.startswith("GET") and ".gguf" in each]
        assert "mmproj" in downloads[0], "what is cut off later leaves no model without its encoder"
        assert "mmproj-m-F32.gguf is left aside: it is for images" in caplog.messages
        hub.requests.clear()
        offline = settings(hub, tmp_path, offline=True)
        assert resolve(REPO, revision=None, settings=offline) == folder
        assert hub.requests == []
    assert (folder / "mmproj.gguf").read_bytes() == encoder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "idefics3"


def test_a_model_for_images_whose_encoder_is_not_there_says_how_to_name_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = TinyPair("qwen2_vl", tmp_path / "hf")
    text = pair.text.write(tmp_path / "m.gguf").read_bytes()
    pair.write_encoder(tmp_path / "encoder.gguf")
    repository = {"m-F16.gguf": text, "mmproj-m.gguf": (tmp_path / "encoder.gguf").read_bytes()}
    with fake_hub.serve(Hub(repository)) as hub:
        resolve(REPO, revision=None, settings=settings(hub, tmp_path), mmproj="off")
        assert not [each for each in caplog.messages if "images are refused" in each]
        offline = settings(hub, tmp_path, offline=True)
        for _ in range(2):
            caplog.clear()
            folder = resolve(REPO, revision=None, settings=offline)
            assert read_vision(folder) is None
            refusals = [each for each in caplog.messages if "images are refused" in each]
            assert len(refusals) == 1
            assert "m-F16.gguf: --mmproj FILE names one" in refusals[0]
        caplog.clear()
        resolve(REPO, revision=None, settings=settings(hub, tmp_path))
    assert not [each for each in caplog.messages if "images are refused" in each]


# Names as publishers give them, and what llama.cpp chooses: find_best_model in its common/download.cpp.
UNSLOTH = [
    "BF16/Big-BF16-00001-of-00003.gguf",
    "Big-IQ4_XS.gguf",
    "Big-Q4_K_M.gguf",
    "Big-UD-Q4_K_XL.gguf",
    "Big-Q8_0.gguf",
    "imatrix_unsloth.gguf",
    "mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    ("names", "tag", "name"),
    [
        (UNSLOTH, None, "Big-Q4_K_M.gguf"),
        (UNSLOTH, "ud-q4_k_xl", "Big-UD-Q4_K_XL.gguf"),
        (UNSLOTH, "BF16", "BF16/Big-BF16-00001-of-00003.gguf"),
        (UNSLOTH, "F16", "BF16/Big-BF16-00001-of-00003.gguf"),
        (UNSLOTH, "Q4_K", None),
        (["a.Q4_K_S.gguf", "a.q8_0.gguf"], None, "a.q8_0.gguf"),
        (["b-F16.gguf", "a-Q5_1.gguf"], None, "a-Q5_1.gguf"),
        (["mmproj-F16.gguf"], None, None),
    ],
)
def test_the_choice_is_llama_cpps(names: list[str], tag: str | None, name: str | None) -> None:
    assert chosen(names, tag) == name


MMPROJS = ["Q8/mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Big-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
        ("F16/Big-F16-00001-of-00003.gguf", "mmproj-BF16.gguf"),
        ("Q8/Big-Q8_0.gguf", "Q8/mmproj-F32.gguf"),
        ("Big.gguf", "mmproj-Q8_0.gguf"),
        ("Big-Q24.gguf", "mmproj-BF16.gguf"),
    ],
)
def test_the_choice_of_an_encoder_is_llama_cpps(model: str, name: str) -> None:
    """By find_best_sibling in its common/download.cpp."""
    assert best_mmproj([*MMPROJS, *UNSLOTH[:-1]], model) == name
    assert best_mmproj(UNSLOTH[:-1], model) is None


def test_types_are_listed_once() -> None:
    assert tags(UNSLOTH) == ["BF16", "IQ4_XS", "Q4_K_M", "Q8_0", "Q4_K_XL"]
    assert tags(["plain.gguf", "mmproj.gguf"]) == ["plain"]
