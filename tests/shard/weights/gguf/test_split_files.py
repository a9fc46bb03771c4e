"""Models in several GGUF files, written by ggml's own package."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from millrace_shard.errors import ModelError
from millrace_shard.weights.download import HubAccess
from millrace_shard.weights.gguf.file_names import models, part_names
from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.hub import HubSettings, resolve
from millrace_testing.models.gguf_files import TinyGguf
from millrace_testing.models.models import assert_scores_as, prompt_of, read_driver

PROMPTS = [prompt_of(20)]


def settings_of(tmp_path: Path) -> HubSettings:
    access = HubAccess(endpoint="http://127.0.0.1:9", token=None, cache=tmp_path / "hub")
    return HubSettings(access=access, offline=True, side_root=tmp_path / "side")


def split(tmp_path: Path, *, bare_first: bool = False) -> tuple[TinyGguf, list[Path]]:
    """A tiny model, and the files of its three parts, or of four if the first has no tensors."""
    tiny, folder = TinyGguf("llama", "Q4_0"), tmp_path / "split"
    folder.mkdir()
    tiny.write(folder / "m.gguf", per_part=8, bare_first=bare_first)
    return tiny, sorted(folder.iterdir())


@pytest.mark.parametrize("bare_first", [False, True])
def test_any_part_and_the_folder_are_the_whole_model(bare_first: bool, tmp_path: Path) -> None:
    tiny, paths = split(tmp_path, bare_first=bare_first)
    assert [path.name for path in paths] == part_names(paths[1].name)
    assert len(paths) == 3 + bare_first
    settings = settings_of(tmp_path)
    names = [*map(str, paths), str(paths[0].parent)]
    folders = {resolve(name, revision=None, settings=settings) for name in names}
    assert len(folders) == 1
    folder = folders.pop()
    assert_scores_as(tiny.model, PROMPTS, read_driver(folder).generate(PROMPTS, 2, chunk=16))
    files = GgufFiles(folder)
    assert [path.resolve() for path in files.paths()] == paths
    assert files.num_bytes() == sum(path.stat().st_size for path in paths)
    files.close()


def test_missing_parts_are_named(tmp_path: Path) -> None:
    _, paths = split(tmp_path)
    settings = settings_of(tmp_path)
    resolve(str(paths[0]), revision=None, settings=settings)
    paths[1].unlink()
    message = (
        r"m-00001-of-00003.gguf is incomplete: m-00002-of-00003.gguf of its 3 parts is missing"
    )
    for name in (str(paths[0]), str(paths[0].parent)):
        with pytest.raises(ModelError, match=message):
            resolve(name, revision=None, settings=settings)
    paths[0].unlink()
    message = r"m-00001-of-00003.gguf, m-00002-of-00003.gguf of its 3 parts are missing"
    with pytest.raises(ModelError, match=message):
        resolve(str(paths[2]), revision=None, settings=settings)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    _, (first, second, third) = split(tmp_path)
    whole = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf is part 2 of 3 by its name, .*no=2"):
        prepare_gguf(first, tmp_path / "cache", tokenizer=None)
    second.write_bytes(whole)
    alone = first.rename(first.with_name("renamed.gguf"))
    with pytest.raises(ModelError, match="is a part of a split file of 3: give all of them names"):
        prepare_gguf(alone, tmp_path / "cache", tokenizer=None)
    other = TinyGguf("llama", "Q4_0", num_hidden_layers=3)
    other.write(tmp_path / "other.gguf", per_part=11)
    (tmp_path / first.name).write_bytes((tmp_path / "other-00001-of-00003.gguf").read_bytes())
    for path in (second, third):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match=r"tensor .* is in .*00001-of.* and in .*00002-of"):
        prepare_gguf(tmp_path / first.name, tmp_path / "cache", tokenizer=None)


def test_a_set_with_fewer_tensors_than_it_announces_is_refused(tmp_path: Path) -> None:
    _, (first, *_) = split(tmp_path)
    data = bytearray(first.read_bytes())
    data[data.index(b"split.tensors.count") + len("split.tensors.count") + 4] += 1
    first.write_bytes(data)
    with pytest.raises(ModelError, match="announces 22 tensors in its 3 parts, which have 21"):
        prepare_gguf(first, tmp_path / "cache", tokenizer=None)


def test_parts_of_none_and_odd_counts_of_parts_are_refused(tmp_path: Path) -> None:
    odd = TinyGguf("llama", "Q4_0").write(tmp_path / "m-00001-of-00000.gguf")
    prepare_gguf(odd, tmp_path / "cache", tokenizer=None)
    for key in ("split.no", "split.count"):
        listed = TinyGguf("llama", "Q4_0", metadata={key: [1, 2]})
        path = listed.write(tmp_path / f"{key}.gguf")
        with pytest.raises(ModelError, match="is part 1 of 1 by its name"):
            prepare_gguf(path, tmp_path / "cache", tokenizer=None)


def test_files_that_are_no_text_models_are_left_aside_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, paths = split(tmp_path)
    for name in ("mmproj-model-f16.gguf", "m-mmproj.gguf", "imatrix.gguf"):
        (paths[0].parent / name).write_bytes(b"")
    with caplog.at_level(logging.INFO):
        settings = settings_of(tmp_path)
        resolve(str(paths[0].parent), revision=None, settings=settings, mmproj="off")
    assert [text for text in caplog.messages if "left aside" in text] == [
        "imatrix.gguf is left aside: it is statistics for quantisation",
        "m-mmproj.gguf is left aside: it is for images",
        "mmproj-model-f16.gguf is left aside: it is for images",
    ]


def test_a_split_file_counts_as_one_model() -> None:
    names = ["b.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "mmproj.gguf", "x.txt"]
    assert models(names) == ["a-00001-of-00002.gguf", "b.gguf"]
