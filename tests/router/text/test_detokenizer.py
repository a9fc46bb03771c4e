"""Incremental text against the decode of the whole, for each kind of decoder, and stop strings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, SupportsIndex, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.text.stopping import StopMatcher, StopTrimmer
from millrace_router.text.tokenizer import Tokenizer, byte_decoder
from millrace_testing.text.texts import (
    CORPUS,
    KINDS,
    byte_fallback,
    byte_level,
    metaspace,
    tokenizer,
    word_piece,
)

BROKEN = "\N{REPLACEMENT CHARACTER}"
ALPHABET = "abcdefghi the lazy 你好世界天气 😀👩‍💻🎉 éöœñ Привет .,!?'\n\t"
TEXT = st.text(st.sampled_from(ALPHABET), max_size=40)
EXACT_KINDS = ["byte_level", "byte_fallback", "metaspace"]


def steps_of(
    one: Tokenizer, prompt: tuple[int, ...], ids: tuple[int, ...]
) -> tuple[list[str], str]:
    text = IncrementalDetokenizer(one, prompt)
    return [text.step(id_) for id_ in ids], text.flush()


@settings(deadline=None, max_examples=150)
@given(text=TEXT, cut=st.integers(0, 40))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_join_to_the_decode_of_the_whole(kind: str, text: str, cut: int) -> None:
    one = tokenizer(kind)
    ids = one.encode(text)
    prompt, generated = ids[:cut], ids[cut:]
    steps, tail = steps_of(one, prompt, generated)
    before = one.decode(prompt, skip_special_tokens=False)
    whole = one.decode(ids, skip_special_tokens=False)
    if prompt and BROKEN not in before:
        assert before + "".join(steps) + tail == whole


@settings(deadline=None, max_examples=150)
@given(text=TEXT)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_split_character_is_withheld_until_whole(kind: str, text: str) -> None:
    one = tokenizer(kind)
    steps, tail = steps_of(one, one.encode("the cat"), one.encode(text))
    assert not any(BROKEN in step for step in steps)
    assert tail == ""


def test_each_emoji_comes_in_one_piece() -> None:
    one = tokenizer("byte_fallback")
    ids = one.encode("😀好")
    steps, tail = steps_of(one, one.encode("the"), ids)
    assert [step for step in steps if step.strip()] == ["😀", "好"]
    assert tail == ""


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_ids_of_byte_level_join_to_the_decode_of_the_whole(data: st.DataObject) -> None:
    one = tokenizer("byte_level")
    ids = tuple(data.draw(st.lists(st.integers(2, one.vocab_size + 5), max_size=40)))
    steps, tail = steps_of(one, (), ids)
    assert "".join(steps) + tail == one.decode(ids, skip_special_tokens=False)


def byte_ids(one: Tokenizer, raw: bytes) -> list[int]:
    vocab = {one.token_bytes(id_): id_ for id_ in range(one.vocab_size)}
    return [vocab[bytes([byte])] for byte in raw]


@settings(deadline=None, max_examples=200)
@given(raw=st.binary(max_size=30))
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_invalid_bytes_are_shown_and_hold_nothing_back(kind: str, raw: bytes) -> None:
    one = tokenizer(kind)
    text = IncrementalDetokenizer(one, one.encode("the"))
    shown = ""
    for index, id_ in enumerate(byte_ids(one, raw), start=1):
        shown += text.step(id_)
        so_far = raw[:index].decode(errors="replace")
        assert so_far.startswith(shown)
        # What is withheld is shorter than a character can be.
        assert len(so_far) - len(shown) <= 3
    assert shown + text.flush() == raw.decode(errors="replace")


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_final_text_is_the_steps_without_special_tokens(data: st.DataObject) -> None:
    one = tokenizer(data.draw(st.sampled_from(EXACT_KINDS)))
    ids = data.draw(st.lists(st.integers(0, one.vocab_size - 1), max_size=30))
    text = IncrementalDetokenizer(one, one.encode("the cat"))
    joined = ""
    for id_ in ids:
        step = text.step(id_)
        joined += step if not one.is_special(id_) else step.removesuffix(one.token_text(id_))
    joined += text.flush()
    assert text.final_text() == joined


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_word_keeps_its_space(kind: str) -> None:
    one = tokenizer(kind)
    prompt, both = one.encode("the cat"), one.encode("the cat the dog")
    assert both[: len(prompt)] == prompt
    text = IncrementalDetokenizer(one, prompt)
    assert "".join(text.step(id_) for id_ in both[len(prompt) :]) == " the dog"
    assert text.final_text() == " the dog"


def test_an_unfinished_tail_is_flushed_once() -> None:
    one = tokenizer("byte_fallback")
    text = IncrementalDetokenizer(one, one.encode("the"))
    first, second, *_ = byte_ids(one, "好".encode())
    assert (text.step(first), text.step(second)) == ("", "")
    assert text.flush() == BROKEN
    assert text.flush() == ""
    assert text.final_text() == BROKEN


def test_a_special_token_ends_an_unfinished_character() -> None:
    one = tokenizer("byte_fallback")
    text = IncrementalDetokenizer(one, one.encode("the"))
    assert text.step(byte_ids(one, "好".encode())[0]) == ""
    assert text.step(2) == BROKEN + "</s>"
    assert text.step(one.encode("the")[0]) == " the"
    assert text.final_text() == BROKEN + " the"


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    for kind in KINDS:
        one = tokenizer(kind)
        ids = one.encode("the cat")
        steps, tail = steps_of(one, ids, (one.vocab_size + 7,) * 20 + ids[-1:])
        assert [step for step in steps if step] == [one.token_text(ids[-1])]
        assert tail == ""


def test_added_tokens_read_as_the_rust_decoder_reads_them() -> None:
    rust = byte_level()
    rust.add_tokens([AddedToken("<think>"), AddedToken("日本"), AddedToken("é b")])
    one = Tokenizer(rust)
    ids = one.encode("a<think>日本é b the")
    steps, tail = steps_of(one, (), ids)
    assert "".join(steps) + tail == rust.decode(ids)
    one.close()


def test_unknown_decoders_are_read_through_a_window() -> None:
    assert byte_decoder(RustTokenizer(models.BPE())) is None
    rust = byte_level()
    assert byte_decoder(rust) is not None
    for decoder in (
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
    ):
        rust.decoder = decoder
        assert byte_decoder(rust) is None


@settings(deadline=None, max_examples=100)
@given(raw=st.binary(min_size=1, max_size=24))
@example(raw=b"\xff" * 24)
def test_a_window_over_broken_bytes_is_bounded(raw: bytes) -> None:
    """An unknown decoder that yields bytes: text is withheld for at most one character."""
    rust = byte_level()
    rust.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("\0", 0, 0)])
    one = Tokenizer(rust)
    assert not one.has_token_bytes
    ids = byte_ids(tokenizer("byte_level"), raw)
    text = IncrementalDetokenizer(one, ())
    silent = 0
    for id_ in ids:
        silent = 0 if text.step(id_) else silent + 1
        assert silent < 8
    one.close()


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


DECODERS: dict[str, Callable[[], RustTokenizer]] = {
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
def decoding_tokenizer(kind: str) -> Tokenizer:
    rust = DECODERS[kind]()
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
@pytest.mark.parametrize("kind", DECODERS)
def test_any_ids_join_to_the_decode_of_the_whole(kind: str, data: st.DataObject) -> None:
    one = decoding_tokenizer(kind)
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
@pytest.mark.parametrize("kind", DECODERS)
def test_any_text_joins_to_the_decode_of_the_whole(kind: str, words: list[str]) -> None:
    one = decoding_tokenizer(kind)
    prompt = one.encode("the cat")
    ids = list(one.encode(" ".join(words)))
    assert text_of(one, prompt, ids) == added_by_the_library(one, prompt, ids)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_long_token_comes_whole(kind: str) -> None:
    one = decoding_tokenizer(kind)
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
@pytest.mark.parametrize("kind", DECODERS)
def test_the_work_for_a_token_does_not_grow_with_the_number_of_tokens(
    kind: str, content: str, length: int
) -> None:
    """Tokens without text, and bytes that never become a character, must not pile up either."""
    one = decoding_tokenizer(kind)
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


LETTERS = st.sampled_from("ab.$\n好")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text(LETTERS, max_size=4), max_size=20)


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The earliest end, found character by character, and the longest stop sequence that ends there."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return end - len(longest), longest
    return None


@settings(deadline=None, max_examples=250)
@given(pieces=PIECES, stops=STOPS)
def test_the_stop_matcher_agrees_with_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        text += piece
        expected = naive(text, stops)
        assert matcher.push(piece) == (expected[1] if expected else None)
        if expected:
            return


@settings(deadline=None, max_examples=250)
@given(pieces=PIECES, stops=STOPS)
def test_trimmer_cuts_where_a_search_of_the_whole_text_would(
    pieces: list[str], stops: list[str]
) -> None:
    trimmer = StopTrimmer(stops)
    shown = "".join(trimmer.push(piece) for piece in pieces) + trimmer.finish()
    text = "".join(pieces)
    expected = naive(text, stops)
    assert shown == (text[: expected[0]] if expected else text)
    assert trimmer.stopped == (expected is not None)


@settings(deadline=None, max_examples=150)
@given(pieces=PIECES, stops=STOPS.filter(bool))
def test_the_trimmer_holds_back_only_possible_beginnings_of_a_stop(
    pieces: list[str], stops: list[str]
) -> None:
    trimmer = StopTrimmer(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += trimmer.push(piece)
        if trimmer.stopped:
            return
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@settings(deadline=None, max_examples=150)
@given(pieces=st.lists(st.text("ab", max_size=5), max_size=12), stop=st.text("ab", min_size=1))
def test_the_longest_beginning_of_a_stop_is_held_back(pieces: list[str], stop: str) -> None:
    """The sequence may repeat itself, so that one prefix ends with another."""
    trimmer = StopTrimmer([stop])
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += trimmer.push(piece)
        if trimmer.stopped:
            return
        longest = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
        assert len(text) - len(shown) == longest


class Counted(str):
    """A string that counts its index operations."""

    __slots__ = ()
    looks = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        Counted.looks += 1
        return super().__getitem__(key)


def test_holding_back_takes_a_few_steps_a_character() -> None:
    """Text that always ends with a prefix of a long stop sequence, whose prefixes all end with shorter ones."""
    trimmer = StopTrimmer(["a" * 4000 + "b"])
    (beginning,) = trimmer._beginnings
    beginning._stop = Counted(beginning._stop)
    for _ in range(6):
        before = Counted.looks
        for _ in range(500):
            trimmer.push("aac")
        for _ in range(500):
            trimmer.push("aaa")
        assert Counted.looks - before <= 3 * 500 * 6
    assert trimmer._held == "a" * 1500


def test_matcher_keeps_less_than_a_stop_sequence() -> None:
    matcher = StopMatcher(["stop", "end"])
    for _ in range(1000):
        assert matcher.push("s to e n ") is None
    assert len(matcher._tail) == 3


def test_regex_characters_and_line_ends_are_literal() -> None:
    assert StopMatcher(["."]).push("abc") is None
    assert StopMatcher(["$"]).push("a\n") is None
    assert StopMatcher(["a+"]).push("aaa a+ b") == "a+"


def test_stops_inside_a_token_and_across_tokens_are_matched() -> None:
    assert StopMatcher(["User:"]).push("\nUser: hello") == "User:"
    matcher = StopMatcher(["User:"])
    assert [matcher.push(part) for part in ("Us", "", "er", ": hi")] == [None, None, None, "User:"]


def test_without_stop_sequences_everything_passes() -> None:
    assert StopMatcher([]).push("anything") is None
    assert StopMatcher([""]).push("anything") is None
    trimmer = StopTrimmer([])
    assert trimmer.push("anything") == "anything"
    assert trimmer.finish() == ""
