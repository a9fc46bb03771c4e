"""Stop sequences against a naive search of the whole text."""

from __future__ import annotations

from typing import SupportsIndex

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.text.stopping import StopMatcher, StopTrimmer

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
def test_matcher_finds_what_a_search_of_the_whole_text_finds(
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
def test_trimmer_holds_back_only_what_may_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
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
def test_what_is_held_back_is_the_longest_beginning_of_a_stop(pieces: list[str], stop: str) -> None:
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


def test_holding_back_costs_a_few_steps_a_character() -> None:
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


def test_a_stop_inside_a_token_and_one_across_tokens() -> None:
    assert StopMatcher(["User:"]).push("\nUser: hello") == "User:"
    matcher = StopMatcher(["User:"])
    assert [matcher.push(part) for part in ("Us", "", "er", ": hi")] == [None, None, None, "User:"]


def test_without_stop_sequences_everything_passes() -> None:
    assert StopMatcher([]).push("anything") is None
    assert StopMatcher([""]).push("anything") is None
    trimmer = StopTrimmer([])
    assert trimmer.push("anything") == "anything"
    assert trimmer.finish() == ""
