"""The largest number of bytes in one token; a prompt with more bytes than that times the limit is too long."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

NFC_SHRINKS = 4
"""Largest ratio of bytes before and after NFC: U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes."""
KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation"})


def longest_token(rust: RustTokenizer) -> int | None:
    """The largest number of UTF-8 bytes of text in one token; None if it is not bounded.

    It is bounded for byte-pair models with a token for every byte and without a step that removes text. An unknown
    word, or blanks that a tokenizer skips, can have any length.
    """
    vocab = rust.get_vocab(with_added_tokens=False)
    added = rust.get_added_tokens_decoder().values()
    if not _has_every_byte(rust, vocab) or any(token.lstrip or token.rstrip for token in added):
        return None
    factor = _shrinking(_parts(rust.normalizer, "normalizers"))
    if factor is None or not all(map(_keeps_text, _parts(rust.pre_tokenizer, "pretokenizers"))):
        return None
    lengths = (len(text.encode()) for text in (*vocab, *(token.content for token in added)))
    return factor * max(lengths)


def _has_every_byte(rust: RustTokenizer, vocab: dict[str, int]) -> bool:
    model = rust.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    steps = _parts(rust.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and all(char in vocab for char in pre_tokenizers.ByteLevel.alphabet())


def _shrinking(steps: list[dict[str, Any]]) -> int | None:
    """The largest ratio of bytes before and after these steps; None if it is not bounded."""
    factor = 1
    for step in steps:
        if step["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            if len(step["content"].encode()) < len(step["pattern"]["String"].encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def _keeps_text(step: dict[str, Any]) -> bool:
    return (step["type"] == "Split" or step["type"] in KEEPS_TEXT) and step.get(
        "behavior"
    ) != "Removed"


def _parts(component: Any, key: str) -> list[dict[str, Any]]:  # noqa: ANN401
    """The steps of a component in order, from its pickled form, which is its part of tokenizer.json."""
    if component is None:
        return []
    return _flat(json.loads(component.__getstate__()), key)


def _flat(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [part for nested in step[key] for part in _flat(nested, key)]
