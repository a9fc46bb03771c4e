"""Incremental text of every kind of tokenizer equals the library's text, at a bounded cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.text.texts import CORPUS, byte_fallback, byte_level, metaspace, word_piece

BROKEN = "\N{REPLACEMENT CHARACTER}"
LONG = "x" * 1000
ADDED = [
    AddedToken("<tool call>", normalized=False),
    AddedToken("  ", normalized=False),
    AddedToken("\n\n ", normalized=False),
    AddedToken("日本 ", normalized=False),
    AddedToken(LONG, normalized=False),
    AddedToken("<|im end|>", special=True, normalized=False),
]


def gemma() -> RustTokenizer:
    """Spaces as marks, none added before the text and none removed."""
    rust = byte_fallback()
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return rust


def llama_with_metaspace(scheme: str) -> RustTokenizer:
    """A tokenizer as converters write Llama 2 and XLM-R: the pre-tokenizer puts the mark before the text."""
    rust = byte_fallback()
    rust.normalizer = None
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return rust


def metaspace_by(scheme: str) -> RustTokenizer:
    rust = metaspace()
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    rust.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return rust


def byte_level_with_prefix() -> RustTokenizer:
    """A tokenizer as in RoBERTa: a space precedes the first word."""
    rust = byte_level()
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return rust


def word_ends() -> RustTokenizer:
    """A tokenizer as in GPT-1: words end with a mark."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def without_decoder() -> RustTokenizer:
    """Tokens are joined by spaces."""
    rust = word_piece()
    rust.decoder = None
    return rust


def word_piece_as_it_is() -> RustTokenizer:
    """No space is taken away before punctuation."""
    rust = word_piece()
    rust.decoder = decoders.WordPiece(cleanup=False)
    return rust


KINDS: dict[str, Callable[[], RustTokenizer]] = {
    "byte-level": byte_level,
    "byte-level-prefix": byte_level_with_prefix,
    "byte-fallback": byte_fallback,
    "gemma": gemma,
    "llama-first": lambda: llama_with_metaspace("first"),
    "llama-always": lambda: llama_with_metaspace("always"),
    "metaspace-first": lambda: metaspace_by("first"),
    "metaspace-always": lambda: metaspace_by("always"),
    "metaspace-never": lambda: metaspace_by("never"),
    "word-piece": word_piece,
    "word-piece-as-it-is": word_piece_as_it_is,
    "word-ends": word_ends,
    "no-decoder": without_decoder,
}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    rust = KINDS[kind]()
    rust.add_tokens(ADDED[:-1])
    rust.add_special_tokens(ADDED[-1:])
    return Tokenizer(rust, validation_workers=1)


def text_of(one: Any, prompt: tuple[int, ...], ids: list[int]) -> str:
    text = IncrementalDetokenizer(one, prompt)
    return "".join(text.step(id_) for id_ in ids) + text.flush()


def added_by_the_library(one: Tokenizer, prompt: tuple[int, ...], ids: list[int]) -> str:
    before = one.decode(prompt, skip_special_tokens=False)
    whole = one.decode([*prompt, *ids], skip_special_tokens=False)
    assert whole.startswith(before)
    return whole[len(before) :]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_join_to_the_decode_of_the_whole(kind: str, data: st.DataObject) -> None:
    one = tokenizer(kind)
    prompt = one.encode("the cat")
    # Those added last are the ones with spaces, the long one and the special one.
    any_id = st.integers(0, one.vocab_size - 1)
    added_id = st.integers(one.vocab_size - len(ADDED), one.vocab_size - 1)
    ids = data.draw(st.lists(any_id | any_id | added_id, max_size=25))
    expected = added_by_the_library(one, prompt, ids)
    if BROKEN not in expected:
        assert text_of(one, prompt, ids) == expected


some_words = st.sampled_from(
    [
        "the",
        "cat",
        ".",
        "don't",
        "é",
        "😀",
        "深度学习",
        "日本 ",
        " ",
        "  ",
        "\n\n ",
        "<tool call>",
        LONG,
    ]
)


@settings(deadline=None, max_examples=60)
@given(words=st.lists(some_words, max_size=12))
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_joins_to_the_decode_of_the_whole(kind: str, words: list[str]) -> None:
    one = tokenizer(kind)
    prompt = one.encode("the cat")
    ids = list(one.encode(" ".join(words)))
    assert text_of(one, prompt, ids) == added_by_the_library(one, prompt, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_token_comes_whole(kind: str) -> None:
    one = tokenizer(kind)
    (long_id,) = (id_ for id_ in one.encode(LONG) if one.token_text(id_).strip() == LONG)
    text = IncrementalDetokenizer(one, one.encode("the"))
    assert [text.step(long_id).strip() for _ in range(3)] == [LONG] * 3


class Counting:
    """A tokenizer that counts decoded tokens."""

    def __init__(self, one: Tokenizer) -> None:
        self._one = one
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._one, name)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return self._one.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        self.num_decoded += 1
        return self._one.token_bytes(token_id)

    def whole_text(self, token_id: int) -> str | None:
        self.num_decoded += 1
        return self._one.whole_text(token_id)


@pytest.mark.parametrize("length", [100, 4000])
@pytest.mark.parametrize("content", ["text", "nothing", "one-byte", "specials"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_costs_a_few_decoded_ones_however_many_there_were(
    kind: str, content: str, length: int
) -> None:
    """Tokens without text, and bytes that never become a character, must not pile up either."""
    one = tokenizer(kind)
    byte = one._rust.token_to_id("<0xE4>")
    ids = {
        "text": list(one.encode(" ".join(CORPUS[:3] * 60))),
        "nothing": [one.vocab_size + 9],
        "one-byte": [one.encode("the")[0] if byte is None else byte],
        "specials": [one.vocab_size - 1],
    }[content]
    ids = (ids * length)[:length]
    counting = Counting(one)
    text = IncrementalDetokenizer(cast("Tokenizer", counting), one.encode("the cat"))
    for id_ in ids:
        text.step(id_)
    text.final_text()
    assert counting.num_decoded <= 16 * length + 64
