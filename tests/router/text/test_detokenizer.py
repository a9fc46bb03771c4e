"""Incremental text against the decode of the whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.text.byte_decoder import ByteDecoder
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.text.texts import KINDS, byte_level, tokenizer

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
    for place, id_ in enumerate(byte_ids(one, raw), start=1):
        shown += text.step(id_)
        so_far = raw[:place].decode(errors="replace")
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
    assert ByteDecoder.of(RustTokenizer(models.BPE())) is None
    rust = byte_level()
    assert ByteDecoder.of(rust) is not None
    for decoder in (
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
    ):
        rust.decoder = decoder
        assert ByteDecoder.of(rust) is None


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
