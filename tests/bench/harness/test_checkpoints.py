"""The benchmark's checkpoints: exact prompts, exact shapes, no early end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.harness.checkpoints import (
    END_TOKEN,
    Shape,
    build_tokenizer,
    ensure_checkpoint,
    write_checkpoint,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.load.levels import prompt

VOCAB_SIZE = 18_600
TINY = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, TINY, seed=3)
    return folder


@pytest.mark.parametrize("num_tokens", [1, 2, 128, 1000])
def test_a_prompt_is_exactly_as_long_as_asked(checkpoint: Path, num_tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert len(tokenizer.encode(prompt(num_tokens, seed="a")).ids) == num_tokens


def test_any_text_goes_through_the_tokenizer_and_back(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = " Ünïcode, 漢字, \x00 and 🙂 zzzzz"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("size", "letters"), [(959, 2), (18_534, 2), (18_535, 3), (VOCAB_SIZE, 3)])
def test_the_vocabulary_has_the_asked_size_and_no_hole(size: int, letters: int) -> None:
    tokenizer = build_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    words = [" " + "z" * length for length in range(1, 4)]
    assert [len(tokenizer.encode(word).ids) == 1 for word in words] == [
        length <= letters for length in range(1, 4)
    ]
    assert tokenizer.token_to_id(END_TOKEN) == 0


@pytest.mark.parametrize("size", [958, 10_000_000])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="no such tokenizer"):
        build_tokenizer(size)


def test_transformers_loads_it_and_never_picks_the_end_token(checkpoint: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(prompt(16, seed="b"), return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert tokens.shape == (1, 40)
    assert 0 not in tokens[0, 16:].tolist()


def test_the_same_seed_gives_the_same_weights(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, seed=3)
    ours, again = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path))
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert all(value.dtype == torch.bfloat16 for value in ours.values())


def test_a_checkpoint_is_written_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ensure_checkpoint.__globals__["SHAPES"], "tiny", TINY)
    (tmp_path / "tiny").mkdir()
    folder = ensure_checkpoint("tiny", folder=tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_checkpoint("tiny", folder=tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
