"""Tokenizers in which the tags of thoughts are tokens, as in models that think."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.reasoning.channels import MARKERS
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.text.texts import byte_level

TAGS = ("<think>", "</think>")
CHANNEL_END = "<|return|>"


@functools.cache
def tagged() -> Tokenizer:
    """As in Qwen 3: tags are tokens, and no control tokens."""
    return Tokenizer(_tagged())


def _tagged() -> RustTokenizer:
    rust = byte_level()
    rust.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return rust


@functools.cache
def channelled() -> Tokenizer:
    """As in gpt-oss: the marks of channels are control tokens."""
    rust = byte_level()
    rust.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return Tokenizer(rust)


def tagged_file(folder: Path) -> int:
    """Write the file of `tagged` to `folder`; returns the size of the vocabulary."""
    rust = _tagged()
    rust.save(str(folder / "tokenizer.json"))
    return rust.get_vocab_size()
