"""Masks written one after the other and by threads are those that each matcher gives by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from millrace_shard.structured_output import mask_computer
from millrace_shard.structured_output.grammar_source import lark_of
from millrace_shard.structured_output.manager import NO_GRAMMARS, GrammarManager
from millrace_shard.structured_output.mask_computer import (
    ALONE_SECONDS,
    NUM_SHARED,
    GuidedSequence,
    MaskComputer,
    MaskFiller,
    MaskLines,
    MaskRequest,
    MaskRow,
)
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary, load_vocabulary
from millrace_testing.engines.grammars import Words, allowed, mask_of, regex
from millrace_testing.text.texts import byte_fallback, byte_level

WORDS = Words([bytes([byte]) for byte in range(ord("a"), ord("z") + 1)], size=75)
LONG = WORDS.matcher(regex("([a-m]{3}|[a-z]{5}){0,4000}"))
NUM_ROWS = 9
WIDTH = 3
UNTOUCHED = 0x5A5A5A5A


def seconds(step: float) -> Iterator[float]:
    """A clock that goes on by so much whenever it is read."""
    return (number * step for number in count())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, NUM_SHARED, NUM_ROWS])
@pytest.mark.parametrize("step", [0.0, ALONE_SECONDS / 3, ALONE_SECONDS], ids=str)
def test_masks_do_not_depend_on_threads_and_stay_in_their_lines(
    *, overlap: bool, num_rows: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = seconds(step)
    monkeypatch.setattr(
        "millrace_shard.structured_output.mask_computer.perf_counter", lambda: next(clock)
    )
    matchers = [WORDS.matcher(regex(f"[{chr(ord('a') + row)}-z]")) for row in range(num_rows)]
    expected = [mask_of(matcher) for matcher in matchers]
    lines = [2 * NUM_ROWS - 2 * row for row in range(num_rows)]
    masks = MaskLines(2 * NUM_ROWS + 1, WIDTH)
    bits = masks.bits
    bits[:] = UNTOUCHED
    filler = MaskFiller(overlap=overlap)
    filler.fill([(m.inner, line) for m, line in zip(matchers, lines, strict=True)], masks)
    assert [sorted(allowed(bits[line])) for line in lines] == expected
    others = np.setdiff1d(np.arange(len(bits)), lines)
    assert (bits[others] == UNTOUCHED).all()


def test_slow_masks_go_to_threads_while_there_are_enough_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_threads: list[int] = []
    monkeypatch.setattr(
        mask_computer,
        "fill_next_token_bitmask_par",
        lambda _, asked, __: by_threads.append(len(asked)),
    )
    matcher = WORDS.matcher(regex("[a-z]*"))
    masks = MaskLines(NUM_ROWS, WIDTH)
    asked = [(matcher.inner, line) for line in range(NUM_ROWS)]
    for step, num_rows, expected in (
        (0.0, NUM_ROWS, []),
        (ALONE_SECONDS / 2, NUM_ROWS, [NUM_ROWS - 1]),
        (ALONE_SECONDS / 2, NUM_SHARED, []),
    ):
        clock = seconds(step)
        monkeypatch.setattr(
            "millrace_shard.structured_output.mask_computer.perf_counter",
            lambda clock=clock: next(clock),
        )
        MaskFiller(overlap=False).fill(asked[:num_rows], masks)
        assert by_threads == expected
        by_threads.clear()


TEXTS = (
    '{"naïve": "x y"}',
    "Don't stop now! 12345",
    "你好 😀",
    "  two  spaces",
    "the quick brown fox",
)


def metaspace() -> Tokenizer:
    """A tokenizer as in T5 and XLM-R: a mark for the space before a word, no bytes."""
    pieces = ["<unk>", "</s>", *"▁abcdefghijklmnopqrstuvwxyz", "▁the", "▁quick", "▁fox", "own"]
    rust = Tokenizer(
        models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0)
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens(["<unk>", "</s>"])
    return rust


def word_piece() -> Tokenizer:
    """A tokenizer as in BERT: the text of a token depends on the token before it."""
    vocab = {"[UNK]": 0, "[SEP]": 1, "a": 2, "##b": 3}
    rust = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece()
    return rust


def folder_of(rust: Tokenizer, folder: Path) -> Path:
    rust.save(str(folder / "tokenizer.json"))
    return folder


def load(
    rust: Tokenizer, folder: Path, *, more: int = 0, eos: tuple[int, ...] = (0,)
) -> Vocabulary:
    size = rust.get_vocab_size() + more
    result = load_vocabulary(folder_of(rust, folder), vocab_size=size, eos_token_ids=eos)
    assert result is not None
    return result


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", TEXTS)
def test_any_text_matches_as_its_tokens(
    make: Callable[[], Tokenizer], text: str, tmp_path: Path
) -> None:
    rust = make()
    vocabulary = load(rust, tmp_path)
    # In the middle of a text, where a tokenizer that marks spaces does not add one.
    ids = rust.encode(f"x{text}", add_special_tokens=False).ids
    decoded = rust.decode(ids)
    assert decoded.lstrip() == f"x{text}".lstrip()
    written = "".join(f"[{char}]" if char not in r"\^]" else f"\\{char}" for char in decoded)
    for pattern, is_match in ((f" ?{written}", True), (f" ?{written}y", False)):
        matcher = Matcher.of(lark_of(regex(pattern)), vocabulary)
        assert matcher.consume_all(ids)
        assert matcher.inner.is_accepting() == is_match


def test_marks_of_a_space_are_spaces_without_bytes_too(tmp_path: Path) -> None:
    rust = metaspace()
    vocabulary = load(rust, tmp_path, eos=(1,))
    matcher = Matcher.of(lark_of(regex(" ?the quick brown fox")), vocabulary)
    assert matcher.consume_all(rust.encode("the quick brown fox", add_special_tokens=False).ids)
    assert matcher.inner.is_accepting()


def test_ids_past_the_tokenizer_and_special_ones_are_never_text(tmp_path: Path) -> None:
    rust = byte_level()
    size = rust.get_vocab_size()
    vocabulary = load(rust, tmp_path, more=77)
    matcher = Matcher.of(lark_of(regex("(?s:.)*")), vocabulary)
    ids = allowed(_words(matcher))
    assert vocabulary.size == size + 77
    assert max(ids) < size
    special = {rust.token_to_id(token) for token in ("<|end|>", "<|user|>")}
    assert ids & special == {0} & special
    assert len(ids) > 200


def _words(matcher: Matcher) -> NDArray[np.int32]:
    return np.frombuffer(matcher.inner.compute_bitmask(), dtype=np.int32)


def test_a_tokenizer_larger_than_the_model_is_cut(tmp_path: Path) -> None:
    rust = byte_level()
    result = load_vocabulary(folder_of(rust, tmp_path), vocab_size=300, eos_token_ids=(0,))
    assert result is not None
    matcher = Matcher.of(lark_of(regex("(?s:.)*")), result)
    assert max(allowed(_words(matcher))) < 300


def test_every_end_of_sequence_id_ends_a_text_and_is_none_itself(tmp_path: Path) -> None:
    rust = byte_level()
    letter, other, third = (rust.get_vocab()[char] for char in "abc")
    vocabulary = load(rust, tmp_path, eos=(0, letter))
    matcher = Matcher.of(lark_of(regex("[a-c]")), vocabulary)
    first = allowed(_words(matcher))
    assert first == {other, third}
    assert matcher.consume(other)
    assert allowed(_words(matcher)) == {0, letter}
    assert matcher.consume(letter)
    assert matcher.has_ended


@pytest.mark.parametrize(
    ("content", "eos"),
    [
        (None, (0,)),
        ("{", (0,)),
        ('{"model": {"vocab": {}}, "decoder": null}', (0,)),
        ('{"decoder": {"type": "ByteLevel"}}', (0,)),
        (byte_level().to_str(), ()),
        (word_piece().to_str(), (1,)),
        (json.dumps([1]), (0,)),
    ],
    ids=["missing", "broken", "no decoder", "no model", "no end", "word pieces", "a list"],
)
def test_an_unusable_tokenizer_disables_grammars_without_a_crash(
    content: str | None, eos: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert load_vocabulary(tmp_path, vocab_size=500, eos_token_ids=eos) is None
    assert "no grammars" in caplog.text
    assert GrammarManager(None, 500).compiler is None
    assert NO_GRAMMARS


def test_states_that_a_text_reaches_are_counted() -> None:
    """Each of these texts has states of its own, and the one that is computed again has none."""
    states = []
    for _ in range(2):
        compiled: Future[Matcher] = Future()
        compiled.set_result(LONG.copy())
        sequence = GuidedSequence(regex(""), compiled)
        computer = MaskComputer(None, WORDS.vocabulary.size, overlap=False)
        (token,) = WORDS.split(b"a")
        for step in range(400):
            new_tokens: Callable[[], Sequence[int]] = partial(list, [token] if step else [])
            request = MaskRequest(slot=0, new_tokens=new_tokens)
            computer.compute([MaskRow(request, sequence, 0)], 1)
        states.append(LONG.lexer.state_bytes)
    if not mask_computer.heap_bytes():
        assert states == [0, 0]
        pytest.skip("the C library does not count the bytes of the heap")
    assert 50_000 < states[0] < 50_000_000
    assert states[1] < 1.2 * states[0]
