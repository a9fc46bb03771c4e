"""A GGUF file with the tokenizer of another folder, as `--tokenizer-name` asks for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from millrace_shard.errors import WeightsError
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.models.gguf_files import SIZES, TinyGguf, read_config

Words = dict[str, int]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyGguf("llama", num_hidden_layers=1).write(tmp_path_factory.mktemp("file") / "m.gguf")


def source(file: Path, folder: Path, change: Callable[[Words], Words] = dict) -> Path:
    """A folder with the tokenizer of `file`, its vocabulary changed."""
    made = prepare_gguf(file, folder / "own", tokenizer=None)
    target = folder / "source"
    target.mkdir()
    content = json.loads((made / "tokenizer.json").read_text())
    model = content["model"]
    special = {each["content"]: each["id"] for each in content["added_tokens"]}
    model["vocab"] = change(model["vocab"])
    model["merges"] = []
    content["added_tokens"] = [
        each | {"id": model["vocab"][text]}
        for each, text in zip(content["added_tokens"], special, strict=True)
    ]
    content["post_processor"] = None
    (target / "tokenizer.json").write_text(json.dumps(content))
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return target


def rotated(words: Words) -> Words:
    """Every token has the id of the next one."""
    return {word: (id_ + 1) % len(words) for word, id_ in words.items()}


def with_two_swapped(words: Words) -> Words:
    return words | {"hell": words["or"], "or": words["hell"]}


def enlarged(words: Words) -> Words:
    return words | {f"more{id_}": id_ for id_ in range(len(words), SIZES["vocab_size"] + 1)}


def prepare(file: Path, folder: Path, change: Callable[[Words], Words] = dict) -> Path:
    return prepare_gguf(file, folder / "cache", tokenizer=source(file, folder, change))


def test_the_tokenizer_and_its_end_match_the_folder(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = prepare(file, tmp_path)
    assert not caplog.records
    assert read_config(made)["eos_token_id"] == 0
    theirs = Tokenizer.from_file(str(tmp_path / "source" / "tokenizer.json"))
    assert Tokenizer.from_file(str(made / "tokenizer.json")).to_str() == theirs.to_str()


def test_another_vocabulary_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as refusal:
        prepare(file, tmp_path, rotated)
    assert str(refusal.value) == (
        f"the tokenizer in {tmp_path / 'source'} has other ids for 266 of the 266 tokens in the file: "
        "id 0 is '<think>', and '<|endoftext|>' in the file; name the model that the file was made from"
    )
    assert not list((tmp_path / "cache").glob("*"))


def test_some_other_tokens_are_reported(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prepare(file, tmp_path, with_two_swapped)
    (record,) = caplog.records
    assert "has 2 of the 266 tokens" in record.message


def test_more_tokens_than_embeddings_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="ids up to 288, and the model embeddings for 288"):
        prepare(file, tmp_path, enlarged)


def test_a_file_without_a_vocabulary_takes_any(tmp_path: Path) -> None:
    whole = TinyGguf("llama", num_hidden_layers=1)
    folder = source(whole.write(tmp_path / "whole.gguf"), tmp_path)
    metadata: dict[str, Any] = dict.fromkeys(
        key for key in whole.metadata if key.startswith("tokenizer.")
    )
    bare = TinyGguf("llama", num_hidden_layers=1, metadata=metadata)
    made = prepare_gguf(bare.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=folder)
    assert (made / "tokenizer.json").is_file()
