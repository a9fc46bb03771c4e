"""Any ids of tokenizers of the usual kinds: pieces join to what the library makes of the whole."""

from __future__ import annotations

import re
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace_router.text.detokenizer import IncrementalDetokenizer, _WindowSteps
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.text.texts import KINDS, tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile("<0x[0-9A-F]{2}>")
OF_BYTES = ["byte_level", "byte_fallback"]
# Small numbers are special tokens and, with byte fallback, bytes; the last ones are in no vocabulary.
IDS = st.lists(st.integers(0, 60) | st.integers(0, 430), max_size=30)
fuzz = settings(deadline=None, max_examples=150)


def pieces_of(one: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """Text of each token, and what is left at the end."""
    text = IncrementalDetokenizer(one, prompt)
    return [*(text.step(id_) for id_ in ids), text.flush()]


def library_text(one: Tokenizer, ids: list[int]) -> str:
    """The library's text of `ids` behind a word.

    For a run of byte tokens that is no UTF-8, the library writes one replacement sign for each byte, and Python's
    decoder writes one for each piece of a character. The reference uses Python's decoder for such runs.
    """
    rust = one._rust
    before = one.decode(one.encode("the"), skip_special_tokens=False)
    text = ""
    for is_byte, run in groupby(ids, lambda id_: bool(BYTE.fullmatch(rust.id_to_token(id_) or ""))):
        run_ids = list(run)
        decoded = one.decode([*one.encode("the"), *run_ids], skip_special_tokens=False)
        added = decoded.removeprefix(before)
        if is_byte and BROKEN in added:
            names = [str(rust.id_to_token(id_)) for id_ in run_ids]
            raw = bytes(int(name[3:5], 16) for name in names)
            added = raw.decode(errors="replace")
        text += added
    return text


@fuzz
@given(ids=IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_decode_of_the_whole(kind: str, ids: list[int]) -> None:
    one = tokenizer(kind)
    known = [id_ for id_ in ids if one._rust.id_to_token(id_) is not None]
    assert "".join(pieces_of(one, [*one.encode("the")], ids)) == library_text(one, known)


@fuzz
@given(text=st.text(max_size=30))
# A token of theirs ends the first character and begins the second.
@example(text="\U000650b6\xd7")
@example(text="\U000650b6\xd7" * 20)
@pytest.mark.parametrize("kind", OF_BYTES)
@pytest.mark.parametrize("steps_of", [IncrementalDetokenizer, _WindowSteps])
def test_any_text_comes_back_with_no_character_broken(
    kind: str, steps_of: type[IncrementalDetokenizer | _WindowSteps], text: str
) -> None:
    """By the bytes of tokens, and by decodes of a few of them, which other kinds need."""
    one = tokenizer(kind)
    steps = steps_of(one, one.encode("the"))
    pieces = [*(steps.step(id_) for id_ in one.encode(text)), steps.flush()]
    space = " " if kind == "byte_fallback" and text else ""
    assert "".join(pieces) == space + text
    assert BROKEN in text or not any(BROKEN in piece for piece in pieces)


@fuzz
@given(ids=IDS, cut=st.integers(0, 30))
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_goes_on_where_it_was(kind: str, ids: list[int], cut: int) -> None:
    """Read again up to any cut, or taken for prompt up to a cut between characters, the rest reads the same."""
    one = tokenizer(kind)
    prompt = [*one.encode("the")]
    pieces = pieces_of(one, prompt, ids)
    again = IncrementalDetokenizer(one, prompt)
    for id_ in ids[:cut]:
        again.step(id_)
    rest = [*(again.step(id_) for id_ in ids[cut:]), again.flush()]
    assert rest == pieces[len(ids[:cut]) :]
    # Where a decode of a few tokens says what one adds, those outside the vocabulary are no prompt to add to.
    is_prompt = one.has_token_bytes or all(
        one._rust.id_to_token(id_) is not None for id_ in ids[:cut]
    )
    if is_prompt and pieces_of(one, prompt, ids[:cut])[-1] == "":
        assert pieces_of(one, [*prompt, *ids[:cut]], ids[cut:]) == rest
