"""Sentencepiece tokenizers in GGUF files, against its definition and transformers' reading of the same files."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.ecosystem.prepare import TOKENIZERS
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from millrace_shard.errors import ModelError
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.models.gguf_files import CONTROL, NORMAL, USER_DEFINED, TinyGguf
from millrace_testing.text.texts import CORPUS

TEXTS: list[str] = [*json.loads((TOKENIZERS / "texts.json").read_text()), *CORPUS[:6]]
UNKNOWN, BYTE = 2, 6
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
OWN = "<|user|>"
SPACE = "▁"
NUM_RANDOM = 300


def pieces() -> list[str]:
    """Pieces learned from a small corpus: first those that merges make, in their order, then characters."""
    rust = Tokenizer(models.BPE())
    rust.normalizer = normalizers.Replace(" ", SPACE)
    rust.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = rust.get_vocab()
    learned = sorted(vocab, key=lambda piece: vocab[piece])
    assert SPACE in learned
    return sorted(learned, key=lambda piece: len(piece) == 1)


def metadata_of(**changes: Any) -> dict[str, Any]:
    """The metadata that a converter writes: the earlier a piece was learned, the higher is its score."""
    learned = pieces()
    tokens = [*SPECIAL, *BYTES, *learned, OWN]
    kinds = [*SPECIAL.values(), *[BYTE] * 256, *[NORMAL] * len(learned), USER_DEFINED]
    scores = [0.0] * (len(SPECIAL) + 256) + [-float(rank) for rank in range(len(learned))] + [0.0]
    result = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": None,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in result.items()}


def write(folder: Path, metadata: dict[str, Any]) -> Path:
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    return TinyGguf("llama", metadata=metadata, vocab_size=vocab_size).write(folder / "m.gguf")


def ours(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    prepared = prepare_gguf(write(folder, metadata), folder / "cache", tokenizer=None)
    return Tokenizer.from_file(str(prepared / "tokenizer.json"))


def theirs(folder: Path, architecture: str) -> PreTrainedTokenizerFast:
    """The reading of transformers of the file that `ours` wrote, as one of a model of `architecture`."""
    _, tokenizer, config = get_gguf_tokenizer(str(folder / "m.gguf"))
    backend, _ = convert_gguf_tokenizer(architecture, tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)


def merged(text: str, metadata: dict[str, Any]) -> list[int]:
    """The ids of a text by the definition of sentencepiece's BPE.

    Of all neighbours whose union is a piece, those with the highest score are joined, the leftmost first. Characters
    that are no piece become their bytes.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    usable = {*tokens} - {*SPECIAL} - {*BYTES}
    parts = [*text]
    while True:
        unions = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in usable
        ]
        if not unions:
            break
        _, place = min(unions)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    result = [
        [ids[part]] if part in usable else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        for part in parts
    ]
    return [id_ for each in result for id_ in each]


def random_text(chooser: random.Random) -> str:
    """Words of the corpus and parts of them, in any order."""
    words = [word for line in CORPUS[:6] for word in line.split()]
    chosen = (chooser.choice(words)[chooser.randrange(3) :] for _ in range(chooser.randrange(9)))
    return chooser.choice(["", " ", "  "]).join(chosen)


@pytest.mark.parametrize("prefixed", [True, False, None])
def test_ids_match_the_definition(prefixed: bool | None, tmp_path: Path) -> None:
    metadata = metadata_of(add_space_prefix=prefixed)
    result = ours(tmp_path, metadata)
    chooser = random.Random(0)
    randoms = [random_text(chooser) for _ in range(NUM_RANDOM)]
    for text in [text for text in [*TEXTS, *randoms] if not any(each in text for each in SPECIAL)]:
        prefix = "" if prefixed is False or not text else SPACE
        expected = merged(prefix + text.replace(" ", SPACE), metadata)
        assert result.encode(text, add_special_tokens=False).ids == expected, text
        assert result.decode(expected) == text


def test_ids_match_transformers(tmp_path: Path) -> None:
    """transformers reads a vocabulary of Phi-3's with the prefix that sentencepiece adds to every text."""
    result = ours(tmp_path, metadata_of())
    expected = theirs(tmp_path, "phi3")
    for text in TEXTS:
        ids = expected.encode(text)
        assert result.encode(text).ids == ids, text
        assert result.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def test_only_the_space_at_the_start_differs_from_transformers(tmp_path: Path) -> None:
    """For Llama, transformers adds no prefix before a space and behind a special token.

    sentencepiece adds it to every text, and llama.cpp to every text between special tokens.
    """
    result = ours(tmp_path, metadata_of())
    expected = theirs(tmp_path, "llama")
    differing = [text for text in TEXTS if result.encode(text).ids != expected.encode(text)]
    assert differing
    assert all(text.startswith((" ", *SPECIAL)) for text in differing)


def test_unknown_characters_are_bytes_that_join_again(tmp_path: Path) -> None:
    result = ours(tmp_path, metadata_of())
    text = "\U0001f9e9 \u0bf8"
    assert {*text.replace(" ", "")}.isdisjoint(pieces())
    encoded = result.encode(text, add_special_tokens=False)
    first, second = ([f"<0x{byte:02X}>" for byte in word.encode()] for word in text.split())
    assert encoded.tokens == [SPACE, *first, SPACE, *second]
    assert result.decode(encoded.ids) == text


@pytest.mark.parametrize(
    ("flags", "begin", "end"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_a_prompt_gets_the_ends_that_the_file_requests(
    flags: dict[str, bool], begin: list[int], end: list[int], tmp_path: Path
) -> None:
    result = ours(tmp_path, metadata_of(**flags))
    plain = result.encode("hello", add_special_tokens=False).ids
    assert result.encode("hello").ids == [*begin, *plain, *end]
    assert theirs(tmp_path, "phi3").encode("hello") == result.encode("hello").ids


def test_a_token_of_the_user_s_is_recognised_in_text(tmp_path: Path) -> None:
    result = ours(tmp_path, metadata_of(add_space_prefix=False))
    encoded = result.encode(f"hello{OWN}</s>hello", add_special_tokens=False)
    plain = result.encode("hello", add_special_tokens=False).tokens
    assert encoded.tokens == [*plain, OWN, "</s>", *plain]
    assert result.decode(encoded.ids) == f"hello{OWN}hello"


@pytest.mark.parametrize("scores", [None, [0.0]])
def test_each_token_has_a_score(scores: list[float] | None, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"scores must have a score for each of \d+ tokens"):
        ours(tmp_path, metadata_of(scores=scores))
