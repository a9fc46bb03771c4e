"""Masks, forced tokens and drafts against finite languages, where the next tokens are known without a parser."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_proto.sequence import Grammar
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.structured_output.mask_computer import Bitmasks, MaskRequest
from millrace_shard.structured_output.matcher import Matcher
from millrace_testing.engines.grammars import (
    EOS,
    OTHER_EOS,
    SPECIAL,
    Compiler,
    Words,
    allowed,
    lark,
    new_manager,
    regex,
)

NONE: tuple[int, ...] = ()
SIZE = 75
"""No multiple of 32, and more than there are pieces."""
WORDS = Words([b"a", b"b", b"c", b"ab", b"abc", b"bc", b"ca", b"bb"], size=SIZE)
ONE_END = Words([b"a", b"b", b"c", b"ab"], size=SIZE, eos=(OTHER_EOS,))
LANGUAGES = st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=6, unique=True)


def of_words(words: Sequence[str]) -> Grammar:
    """A grammar of these texts and no others."""
    return lark("start: " + " | ".join(f'"{word}"' for word in words))


def ids_of(text: bytes) -> np.ndarray:
    return np.array(WORDS.split(text), dtype=np.int64)


def row(slot: int, new_tokens: Sequence[int] = (), **options: object) -> MaskRequest:
    return MaskRequest(slot=slot, new_tokens=lambda: new_tokens, **options)  # type: ignore[arg-type]


def step(grammars: GrammarManager, *rows: MaskRequest) -> Bitmasks:
    return grammars.start(rows).result()


@pytest.fixture(params=[True, False], ids=["during the forward pass", "on request"])
def grammars(request: pytest.FixtureRequest) -> GrammarManager:
    return new_manager(WORDS, overlap=request.param)


@settings(max_examples=60, deadline=None)
@given(words=LANGUAGES, seed=st.integers(0, 1000))
def test_a_mask_allows_exactly_the_tokens_that_continue_some_text(
    words: list[str], seed: int
) -> None:
    grammars, rng = new_manager(WORDS), random.Random(seed)
    language = [word.encode() for word in words]
    grammars.admit(3, of_words(words), np.array(NONE, dtype=np.int64))
    new_tokens: tuple[int, ...] = ()
    so_far = b""
    while True:
        masks = step(grammars, row(3, new_tokens))
        expected = WORDS.expected(language, so_far)
        assert allowed(masks.bits[0]) == expected
        token = rng.choice(sorted(expected))
        if token in WORDS.eos:
            break
        new_tokens, so_far = (token,), so_far + WORDS.tokens[token]
    after = step(grammars, row(3, (token,), max_jump_forward_tokens=4, drafts=(5,)))
    assert allowed(after.bits[0]) == set(WORDS.eos)
    assert not after.forced[0]


@settings(max_examples=60, deadline=None)
@given(words=LANGUAGES, seed=st.integers(0, 1000), num_drafts=st.integers(1, 5))
def test_masks_after_drafts_match_the_text_with_them_and_drafts_leave_no_trace(
    words: list[str], seed: int, num_drafts: int
) -> None:
    grammars, rng = new_manager(WORDS), random.Random(seed)
    language = [word.encode() for word in words]
    grammars.admit(0, of_words(words), np.array(NONE, dtype=np.int64))
    drafts = [rng.randrange(len(WORDS.tokens)) for _ in range(num_drafts)]
    if rng.random() < 0.7:
        text = rng.choice(language)
        drafts = [*WORDS.split(text, rng), EOS, EOS][:num_drafts]
    masks = step(grammars, row(0, drafts=drafts))
    so_far, has_ended = b"", False
    for depth in range(len(drafts) + 1):
        expected = set(WORDS.eos) if has_ended else WORDS.expected(language, so_far)
        assert allowed(masks.bits[depth]) == expected, depth
        if depth == len(drafts):
            break
        if drafts[depth] not in expected:
            assert (masks.bits[depth + 1 :] == -1).all()
            break
        if drafts[depth] in WORDS.eos:
            has_ended = True
        else:
            so_far += WORDS.tokens[drafts[depth]]
    again = step(grammars, row(0))
    assert allowed(again.bits[0]) == WORDS.expected(language, b"")
    assert not len(again.failed)


def chain_of(words: Words, language: Sequence[bytes], so_far: bytes, most: int) -> tuple[int, ...]:
    forced: list[int] = []
    while len(forced) < most:
        expected = words.expected(language, so_far)
        if len(expected) != 1:
            break
        (token,) = expected
        forced.append(token)
        if token in words.eos:
            break
        so_far += words.tokens[token]
    return tuple(forced)


@settings(max_examples=60, deadline=None)
@given(words=LANGUAGES, most=st.integers(1, 9))
def test_jump_forward_tokens_match_single_steps(words: list[str], most: int) -> None:
    language = [word.encode() for word in words]
    grammars = new_manager(ONE_END)
    grammars.admit(1, of_words(words), np.array(NONE, dtype=np.int64))
    so_far, new_tokens = b"", NONE
    for _ in range(20):
        masks = step(grammars, row(1, new_tokens, max_jump_forward_tokens=most))
        forced = chain_of(ONE_END, language, so_far, most)
        assert masks.forced == (forced,)
        assert allowed(masks.bits[0]) == ONE_END.expected(language, so_far)
        if forced:
            new_tokens = ()
            so_far += ONE_END.text(forced)
            if forced[-1] in ONE_END.eos:
                return
        else:
            new_tokens = (min(ONE_END.expected(language, so_far)),)
            if new_tokens[0] in ONE_END.eos:
                return
            so_far += ONE_END.text(new_tokens)
    pytest.fail("no end of the text")


def test_the_end_is_the_last_forced_token() -> None:
    grammars = new_manager(ONE_END)
    grammars.admit(0, lark('start: "cc"'), np.array(NONE, dtype=np.int64))
    c = ONE_END.tokens.index(b"c")
    assert step(grammars, row(0, max_jump_forward_tokens=9)).forced == ((c, c, OTHER_EOS),)


@pytest.mark.parametrize("num_rows", [5, 2, 3])
def test_each_row_has_its_own_forced_tokens(num_rows: int) -> None:
    """Steps of more rows and of fewer than the one before, whose masks they overwrite."""
    grammars = new_manager(ONE_END)
    languages = [[b"c" * (1 + slot), b"c" * (1 + slot) + b"ba"] for slot in range(5)]
    for slots in (range(2), range(2, 2 + num_rows)):
        for slot in slots:
            words = [word.decode() for word in languages[slot % 5]]
            grammars.admit(slot, of_words(words), np.array(NONE, dtype=np.int64))
        masks = step(grammars, *(row(slot, max_jump_forward_tokens=4) for slot in slots))
        expected = tuple(chain_of(ONE_END, languages[slot % 5], b"", 4) for slot in slots)
        assert masks.forced == expected
        assert [len(forced) for forced in expected] == [min(4, 1 + slot % 5) for slot in slots]
        assert all(allowed(bits) == {ONE_END.tokens.index(b"c")} for bits in masks.bits)


def test_a_row_with_forced_tokens_ignores_its_drafts() -> None:
    grammars = new_manager(ONE_END)
    grammars.admit(0, lark('start: "cc" ("a"|"b")'), np.array(NONE, dtype=np.int64))
    c = ONE_END.tokens.index(b"c")
    masks = step(grammars, row(0, max_jump_forward_tokens=9, drafts=(c, c)))
    assert masks.forced == ((c, c),)
    assert allowed(masks.bits[0]) == {c}
    assert (masks.bits[1:] == -1).all()


def test_where_every_end_is_allowed_none_is_forced(grammars: GrammarManager) -> None:
    grammars.admit(0, lark('start: "c"'), np.array(NONE, dtype=np.int64))
    c = WORDS.tokens.index(b"c")
    masks = step(grammars, row(0, max_jump_forward_tokens=9))
    assert masks.forced == ((c,),)
    assert allowed(step(grammars, row(0)).bits[0]) == {EOS, OTHER_EOS}


@settings(max_examples=40, deadline=None)
@given(words=LANGUAGES, cut=st.integers(0, 8), seed=st.integers(0, 100))
def test_a_replayed_sequence_goes_on_where_it_was(words: list[str], cut: int, seed: int) -> None:
    grammars = new_manager(WORDS)
    so_far = words[0].encode()[:cut]
    generated = np.array(WORDS.split(so_far, random.Random(seed)), dtype=np.int64)
    grammars.admit(0, of_words(words), generated)
    language = [word.encode() for word in words]
    assert allowed(step(grammars, row(0)).bits[0]) == WORDS.expected(language, so_far)


def test_generated_tokens_that_do_not_match_fail_only_their_row(
    grammars: GrammarManager,
) -> None:
    grammars.admit(4, lark('start: "ab"'), ids_of(b"c"))
    grammars.admit(5, lark('start: "ab"'), ids_of(b"a"))
    masks = step(grammars, row(4, drafts=(3, 4)), row(5))
    assert list(masks.failed) == [4]
    assert (masks.bits[:3] == -1).all()
    assert allowed(masks.bits[3]) == {WORDS.tokens.index(b"b")}


def test_a_token_that_does_not_match_fails_its_row_for_good(grammars: GrammarManager) -> None:
    for slot in (1, 2):
        grammars.admit(slot, lark('start: "ab" "c"*'), np.array(NONE, dtype=np.int64))
    c, ab = WORDS.tokens.index(b"c"), WORDS.tokens.index(b"ab")
    assert list(step(grammars, row(1, (c,)), row(2, (ab,))).failed) == [1]
    after = step(grammars, row(1), row(2, (c,)))
    assert list(after.failed) == [1]
    assert allowed(after.bits[1]) == {c, EOS, OTHER_EOS}


def test_a_grammar_that_leads_nowhere_fails_its_row(grammars: GrammarManager) -> None:
    # `d` is in no token of this vocabulary.
    grammars.admit(0, lark('start: "ad"'), np.array(NONE, dtype=np.int64))
    grammars.admit(1, lark('start: "ab"'), np.array(NONE, dtype=np.int64))
    a, ab = WORDS.tokens.index(b"a"), WORDS.tokens.index(b"ab")
    assert not len(step(grammars, row(0), row(1)).failed)
    masks = step(grammars, row(0, (a,)), row(1, (ab,)))
    assert list(masks.failed) == [0]
    assert allowed(masks.bits[1]) == {EOS, OTHER_EOS}


def test_forced_tokens_that_lead_nowhere_fail_their_row(grammars: GrammarManager) -> None:
    grammars.admit(0, lark('start: "bd"'), np.array(NONE, dtype=np.int64))
    masks = step(grammars, row(0, max_jump_forward_tokens=9))
    assert list(masks.failed) == [0]
    assert masks.forced == ((),)
    assert (masks.bits == -1).all()


def test_a_grammar_that_does_not_compile_fails_only_its_row(grammars: GrammarManager) -> None:
    grammars.admit(0, regex("(a"), np.array(NONE, dtype=np.int64))
    grammars.admit(1, regex("a"), np.array(NONE, dtype=np.int64))
    masks = step(grammars, row(0), row(1))
    assert list(masks.failed) == [0]
    assert allowed(masks.bits[1]) == {WORDS.tokens.index(b"a")}


def test_without_a_usable_tokenizer_rows_with_grammars_fail() -> None:
    grammars = GrammarManager(None, SIZE)
    grammars.admit(0, regex("a"), np.array(NONE, dtype=np.int64))
    assert list(step(grammars, row(0)).failed) == [0]


def test_only_ends_are_allowed_after_the_end_of_a_text(grammars: GrammarManager) -> None:
    grammars.admit(0, lark('start: "a"'), np.array(NONE, dtype=np.int64))
    a = WORDS.tokens.index(b"a")
    step(grammars, row(0, (a, OTHER_EOS)))
    for new_tokens in ((), (a,), (EOS,)):
        masks = step(grammars, row(0, new_tokens))
        assert allowed(masks.bits[0]) == {EOS, OTHER_EOS}
        assert not len(masks.failed)


def test_a_grammar_may_name_special_tokens(grammars: GrammarManager) -> None:
    grammars.admit(0, lark('start: <|tool|> "a"'), np.array(NONE, dtype=np.int64))
    masks = step(grammars, row(0, max_jump_forward_tokens=1))
    assert masks.forced == ((SPECIAL,),)
    assert allowed(step(grammars, row(0)).bits[0]) == {WORDS.tokens.index(b"a")}


def test_no_text_has_a_special_token_or_an_id_without_bytes(grammars: GrammarManager) -> None:
    grammars.admit(0, regex(r"(?s:.)*"), np.array(NONE, dtype=np.int64))
    masks = step(grammars, row(0))
    pieces = {id_ for id_, token in enumerate(WORDS.tokens) if token and id_ > SPECIAL}
    assert allowed(masks.bits[0]) == pieces | {EOS, OTHER_EOS}
    assert masks.bits.shape == (1, -(-SIZE // 32))


def test_slots_belong_to_the_last_admission(grammars: GrammarManager) -> None:
    a, b = WORDS.tokens.index(b"a"), WORDS.tokens.index(b"b")
    grammars.admit(0, regex("a"), np.array(NONE, dtype=np.int64))
    grammars.drop(np.array([0, 7]))
    grammars.admit(0, regex("b"), np.array(NONE, dtype=np.int64))
    assert allowed(step(grammars, row(0)).bits[0]) == {b}
    grammars.clear()
    grammars.admit(0, regex("a"), np.array(NONE, dtype=np.int64))
    assert allowed(step(grammars, row(0)).bits[0]) == {a}


class Slow(Compiler):
    """Compiles `slow` only once it is let."""

    def __init__(self, words: Words, slow: Grammar) -> None:
        super().__init__(words)
        self.slow = slow
        self.may_go_on = Event()

    def matcher(self, grammar: Grammar) -> Matcher:
        if grammar == self.slow:
            assert self.may_go_on.wait(30)
        return super().matcher(grammar)


def test_masks_of_others_come_while_a_grammar_is_compiled() -> None:
    slow = regex("abc")
    compiler = Slow(WORDS, slow)
    grammars = GrammarManager(compiler, SIZE)  # type: ignore[arg-type]
    grammars.admit(0, slow, np.array(NONE, dtype=np.int64))
    grammars.admit(1, regex("c*"), np.array(NONE, dtype=np.int64))
    c = WORDS.tokens.index(b"c")
    for _ in range(3):
        assert c in allowed(step(grammars, row(1, (c,))).bits[0])
    waiting = grammars.start([row(0)])
    compiler.may_go_on.set()
    assert WORDS.tokens.index(b"a") in allowed(waiting.result().bits[0])


def test_the_worker_reads_new_tokens_so_that_no_caller_waits(
    grammars: GrammarManager,
) -> None:
    grammars.admit(0, regex("ab"), np.array(NONE, dtype=np.int64))
    sampled: Future[tuple[int, ...]] = Future()
    job = grammars.start([MaskRequest(slot=0, new_tokens=lambda: sampled.result(30))])
    sampled.set_result((WORDS.tokens.index(b"a"),))
    assert allowed(job.result().bits[0]) == {WORDS.tokens.index(b"b")}


def test_unreadable_new_tokens_fail_the_step(grammars: GrammarManager) -> None:
    grammars.admit(0, regex("ab"), np.array(NONE, dtype=np.int64))

    def broken() -> Sequence[int]:
        raise KeyboardInterrupt("the device is gone")

    new_tokens: Callable[[], Sequence[int]] = broken
    with pytest.raises(RuntimeError, match="the device is gone"):
        grammars.start([MaskRequest(slot=0, new_tokens=new_tokens)]).result()


def test_rows_are_followed_apart(grammars: GrammarManager) -> None:
    languages = {slot: [f"{'ab' * slot}c", "ca"] for slot in range(8)}
    for slot, words in languages.items():
        grammars.admit(slot, of_words(words), np.array(NONE, dtype=np.int64))
    so_far = dict.fromkeys(languages, b"")
    new_tokens: dict[int, tuple[int, ...]] = dict.fromkeys(languages, ())
    rng = random.Random(5)
    for _ in range(4):
        slots = sorted(languages, key=lambda _: rng.random())[:5]
        masks = step(grammars, *(row(slot, new_tokens[slot]) for slot in slots))
        for mask, slot in zip(masks.bits, slots, strict=True):
            language = [word.encode() for word in languages[slot]]
            expected = WORDS.expected(language, so_far[slot])
            assert allowed(mask) == expected
            texts = sorted(expected - set(WORDS.eos))
            new_tokens[slot] = (rng.choice(texts),) if texts else ()
            so_far[slot] += WORDS.text(new_tokens[slot])
