"""The vocabulary of a GGUF file: its tokens, and the ids that the file names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.tokenizer import TokenKind, Vocabulary

CONTROL, NORMAL = TokenKind.CONTROL, TokenKind.NORMAL


def read(*, vocab_size: int = 8, **values: Any) -> Vocabulary:
    found = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return Vocabulary.read(Metadata(found, "m.gguf"), vocab_size=vocab_size)


def test_tokens_are_found_by_id_kind_and_name() -> None:
    kinds = np.array([CONTROL, NORMAL, NORMAL], np.int32)
    found = read(tokens=["<s>", "a", "b"], token_type=kinds, bos_token_id=0)
    assert found.ids == {"<s>": 0, "a": 1, "b": 2}
    assert found.of_kind(TokenKind.NORMAL) == [1, 2]
    assert found.text("bos") == "<s>"
    assert found.text("eos") is None


def test_without_kinds_all_are_normal() -> None:
    assert read(tokens=["a", "b"]).of_kind(TokenKind.NORMAL) == [0, 1]


def test_empty_tokens_get_names() -> None:
    assert read(tokens=["a", "", ""]).tokens == ["a", "[EMPTY_1]", "[EMPTY_2]"]


def test_tokens_that_end_an_answer() -> None:
    """Those that the file names come first; a word with the text of one is a word."""
    tokens = ["<s>", "<|im_end|>", "<|eot_id|>", "</s>", "stop"]
    kinds = np.array([CONTROL, CONTROL, CONTROL, NORMAL, NORMAL], np.int32)
    found = read(tokens=tokens, token_type=kinds, eos_token_id=2, eot_token_id=4)
    assert found.end_ids() == [2, 4, 1]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({}, UnsupportedModel, "no tokenizer.ggml.tokens.*--tokenizer-name"),
        ({"tokens": list("abcdefghi")}, WeightsError, "9 tokens, and the model embeddings for 8"),
        ({"tokens": ["a", "b", "a"]}, WeightsError, "token 'a' twice"),
        ({"tokens": ["a", "b"], "token_type": np.array([1])}, WeightsError, "1 kinds for 2 tokens"),
        ({"tokens": ["a"], "eos_token_id": 1}, WeightsError, "eos_token_id=1, .* has 1 tokens"),
    ],
)
def test_what_cannot_be_used_is_named(
    values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(**values)
