"""Tokenizer: the Rust tokenizer behind bounds, with byte offsets."""

from __future__ import annotations

import asyncio
import sys
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.text.tokenizer import (
    NFC_SHRINKS,
    SEPARATOR,
    Tokenizer,
    TokenizerError,
    TokenTexts,
    longest_token,
)
from millrace_testing.text.texts import (
    CORPUS,
    KINDS,
    byte_fallback,
    byte_level,
    tokenizer,
    word_piece,
    write_model,
)


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_as_the_rust_tokenizer_does(kind: str) -> None:
    rust = KINDS[kind]()
    one = Tokenizer(rust)
    for line in CORPUS[:6]:
        assert one.encode(line) == tuple(rust.encode(line).ids)
    one.close()


@settings(deadline=None, max_examples=60)
@given(text=st.text(st.sampled_from("ab the好😀é \n"), max_size=30))
def test_spans_are_byte_slices_that_cover_the_text(text: str) -> None:
    spans = tokenizer("byte_level").encode_with_offsets(text)
    raw = text.encode()
    assert [span.id for span in spans] == list(tokenizer("byte_level").encode(text))
    for span in spans:
        assert raw[span.start : span.stop].decode() == span.text
    covered = {place for span in spans for place in range(span.start, span.stop)}
    assert covered == set(range(len(raw)))


def test_offsets_count_bytes_not_characters() -> None:
    spans = tokenizer("metaspace").encode_with_offsets("é the")
    assert (spans[-1].text, spans[-1].start, spans[-1].stop) == (" the", 2, 6)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff b"])
def test_lone_surrogates_are_a_clear_error(text: str) -> None:
    with pytest.raises(TokenizerError):
        tokenizer("byte_level").encode(text)
    with pytest.raises(TokenizerError):
        tokenizer("byte_level").encode_with_offsets(text)


@pytest.mark.parametrize(
    "text", ["", "\x00", "\U0010ffff", " " * 5000, "a" * 20000, "\ufeff\u200d", "<|end|>" * 50]
)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_text_is_only_text(kind: str, text: str) -> None:
    assert isinstance(tokenizer(kind).encode(text), tuple)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    rust = byte_level()
    rust.enable_truncation(3)
    rust.enable_padding(length=64)
    rust.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    try:
        assert loaded.encode(CORPUS[0]) == tokenizer("byte_level").encode(CORPUS[0])
    finally:
        loaded.close()


def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_special_tokens_are_known_and_left_out_on_request(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write_model(tmp_path))
    try:
        end = loaded.encode("<|end|>")
        assert len(end) == 1
        assert loaded.is_special(end[0])
        ids = (*loaded.encode("hello"), *end)
        assert not loaded.is_special(ids[0])
        assert loaded.decode(ids, skip_special_tokens=True) == "hello"
        assert loaded.decode(ids, skip_special_tokens=False) == "hello<|end|>"
        assert loaded.vocab_size == 420
    finally:
        loaded.close()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "word_piece"])
def test_token_text_keeps_its_leading_space(kind: str) -> None:
    one = tokenizer(kind)
    ids = one.encode("the dog the dog the dog")
    assert "".join(map(one.token_text, ids)).lstrip() == "the dog the dog the dog"
    assert one.token_text(10**6) == ""


def test_special_tokens_are_added_only_if_asked() -> None:
    from tokenizers.processors import TemplateProcessing

    rust = byte_fallback()
    rust.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    one = Tokenizer(rust)
    try:
        with_start = one.encode("the cat")
        assert with_start == (1, *one.encode("the cat", add_special_tokens=False))
        first = one.encode_with_offsets("the cat")[0]
        assert (first.id, first.text, first.start, first.stop) == (1, "", 0, 0)
    finally:
        one.close()


async def test_encode_async_uses_a_bounded_number_of_other_threads() -> None:
    one = _RecordingTokenizer(byte_level(), validation_workers=2)
    try:
        texts = [f"{line} {i}" for i, line in enumerate(CORPUS)]
        encoded = await asyncio.gather(*(one.encode_async(text) for text in texts))
        assert encoded == [Tokenizer.encode(one, text) for text in texts]
        assert threading.get_ident() not in one.threads
        assert len(one.threads) <= 2
        with pytest.raises(TokenizerError):
            await one.encode_async("\ud800")
    finally:
        one.close()


class _RecordingTokenizer(Tokenizer):
    def __init__(self, rust: RustTokenizer, *, validation_workers: int) -> None:
        super().__init__(rust, validation_workers=validation_workers)
        self.threads: set[int] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        if threading.current_thread() is not threading.main_thread():
            self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_the_loop_goes_on_while_a_long_text_is_encoded() -> None:
    """With no forced switch of threads, the loop turns only if the encoder lets it."""
    turns = 0
    during: list[int] = []

    class Watched(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            before = turns
            ids = super().encode(text, add_special_tokens=add_special_tokens)
            during.append(turns - before)
            return ids

    one = Watched(byte_level(), validation_workers=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        # On a busy machine the event loop may not run within the few milliseconds of one text.
        while len(during) < 100 and not any(during):
            encoding = asyncio.ensure_future(one.encode_async(" ".join(CORPUS) * 200))
            while not encoding.done():
                turns += 1
                await asyncio.sleep(0.0001)
            assert len(await encoding) > 10_000
        assert any(during)
    finally:
        sys.setswitchinterval(interval)
        one.close()


SHRINKING = "\u1fbe\u0308\u0301\u212a\u1112\u1161\u11ab"


def composing() -> RustTokenizer:
    """A tokenizer as in Qwen: characters are composed first."""
    rust = byte_level()
    rust.normalizer = normalizers.NFC()
    return rust


def llama_like() -> RustTokenizer:
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


BOUNDED = {"byte_level": byte_level(), "composing": composing(), "byte_fallback": llama_like()}
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


TEXTS = st.text("ab\n🙂", max_size=4)


@given(texts=st.lists(TEXTS, max_size=8), part=st.text("ab\n🙂", min_size=1, max_size=3))
@example(texts=["ab", "ba", "", "aa"], part="a")
@example(texts=["a", "b"], part="ab")
def test_each_token_with_the_part_is_found_once(texts: list[str], part: str) -> None:
    found = list(TokenTexts(texts).having(part))
    assert found == [index for index, text in enumerate(texts) if part in text]


def test_no_part_reaches_over_two_tokens() -> None:
    assert not list(TokenTexts(["a", "b"]).having(f"a{SEPARATOR}b"))
