"""The bound of bytes in one token holds for real tokenizers and texts."""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.text.token_length import NFC_SHRINKS, longest_token
from millrace_testing.text.texts import byte_level, word_piece

SHRINKING = "\u1fbe\u0308\u0301\u212a\u1112\u1161\u11ab"


def composing() -> RustTokenizer:
    """A tokenizer as in Qwen: characters are composed first."""
    rust = byte_level()
    rust.normalizer = normalizers.NFC()
    return rust


def byte_fallback() -> RustTokenizer:
    """A tokenizer as in Llama 2: byte-pair with a token for each byte."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"abc▁", "ab", "▁ab", "▁▁"]
    rust = RustTokenizer(
        models.BPE(
            {piece: id_ for id_, piece in enumerate(pieces)},
            [("a", "b"), ("▁", "ab"), ("▁", "▁")],
            byte_fallback=True,
        )
    )
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return rust


def splitting() -> RustTokenizer:
    """A tokenizer as in Llama 3: text is split by a pattern first."""
    rust = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return rust


BOUNDED = {"byte_level": byte_level(), "composing": composing(), "byte_fallback": byte_fallback()}
BOUNDED["splitting"] = splitting()


@pytest.mark.parametrize("kind", BOUNDED)
@given(
    text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(SHRINKING)))
)
@example(text=" " * 4000)
@example(text="the quick" * 500)
@example(text="\u1fbe\u0308\u0301" * 500)
@example(text="<|user|>" * 100)
def test_no_text_becomes_fewer_tokens(kind: str, text: str) -> None:
    rust = BOUNDED[kind]
    most = longest_token(rust)
    assert most is not None
    ids = rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert len(ids) * most >= len(text.encode())


def without_a_byte() -> RustTokenizer:
    rust = RustTokenizer(models.BPE({"a": 0, "b": 1}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return rust


def swallowing_blanks() -> RustTokenizer:
    rust = byte_level()
    rust.add_special_tokens([AddedToken("<|x|>", rstrip=True, special=True)])
    return rust


def removing_blanks() -> RustTokenizer:
    rust = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return rust


def stripping() -> RustTokenizer:
    rust = byte_level()
    rust.normalizer = normalizers.Strip()
    return rust


def cutting_short() -> RustTokenizer:
    rust = byte_level()
    rust.normalizer = normalizers.Replace("abcdef" * 5, "a")
    return rust


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (word_piece, "x" * 999),
        (without_a_byte, "c" * 999),
        (swallowing_blanks, "<|x|>" + " " * 999),
        (removing_blanks, " " * 999),
        (stripping, " " * 999),
        (cutting_short, "abcdef" * 5 * 999),
    ],
)
def test_where_a_token_may_stand_for_any_text_nothing_is_promised(
    make: Callable[[], RustTokenizer], text: str
) -> None:
    rust = make()
    ids = rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
    # The text really has far fewer tokens than its length divided by the longest vocabulary entry.
    longest = max(map(len, rust.get_vocab()))
    assert len(ids) * longest < len(text)
    assert longest_token(rust) is None


def test_composing_shrinks_no_text_by_more() -> None:
    """Texts that compose to one character have its decomposition."""
    longest_source: dict[str, int] = defaultdict(int)
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for char in characters:
        plain = unicodedata.normalize("NFD", char)
        if len(plain) == 1:
            longest_source[plain] = max(longest_source[plain], len(char.encode()))
    worst = max(
        sum(longest_source[part] for part in unicodedata.normalize("NFD", char))
        / len(char.encode())
        for char in characters
    )
    assert 3 < worst <= NFC_SHRINKS
