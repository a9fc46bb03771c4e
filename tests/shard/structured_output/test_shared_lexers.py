"""Sequences of one grammar share the limited states of its lexer without harm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
from llguidance import LLParserLimits

from millrace_shard.structured_output import grammar_compiler, matcher
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.structured_output.mask_computer import Bitmasks, MaskRequest
from millrace_testing.engines.grammars import allowed, regex
from millrace_testing.text.texts import byte_level

VOCAB_SIZE = 430
STATES = 600
"""A text takes some hundreds of them; several share them."""
NUM_TEXTS = 5
NUM_TOKENS = 40
GRAMMAR = regex(r"[a-z ]*[aeiou][a-z ]{9}[xyz][a-z ]*")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    made = GrammarCompiler.load(tmp_path, vocab_size=VOCAB_SIZE, eos_token_ids=(0,))
    assert made is not None
    limits = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
    monkeypatch.setattr(matcher, "LIMITS", limits)
    monkeypatch.setattr(grammar_compiler, "RENEW_SECONDS", 60.0)
    yield made
    made.close()


class Texts:
    """Follows texts of one grammar, each by its own generator."""

    def __init__(self, compiler: GrammarCompiler, numbers: range) -> None:
        self.grammars = GrammarManager(compiler, VOCAB_SIZE, overlap=False)
        self.masks: dict[int, list[set[int]]] = {number: [] for number in numbers}
        self._last: dict[int, tuple[int, ...]] = dict.fromkeys(numbers, ())
        self._random = {number: Random(number) for number in numbers}
        # A grammar that is admitted while it is being compiled is compiled once more, and shares nothing.
        compiler.matcher(GRAMMAR)
        for number in numbers:
            self.grammars.admit(number, GRAMMAR, np.zeros(0, dtype=np.int64))

    def step(self) -> Bitmasks:
        """A token of each."""
        rows = [
            MaskRequest(slot=slot, new_tokens=partial(self._last.__getitem__, slot))
            for slot in self._last
        ]
        masks = self.grammars.start(rows).result()
        for slot, mask in zip(self._last, masks.bits, strict=True):
            found = allowed(mask)
            self.masks[slot].append(found)
            self._last[slot] = (self._random[slot].choice(sorted(found - {0})),)
        return masks


def test_a_text_goes_on_whatever_others_have_used_up(compiler: GrammarCompiler) -> None:
    together = Texts(compiler, range(NUM_TEXTS))
    for _ in range(NUM_TOKENS):
        assert not len(together.step().failed)
    for number in range(NUM_TEXTS):
        alone = Texts(compiler, range(number, number + 1))
        for _ in range(NUM_TOKENS):
            assert not len(alone.step().failed)
        assert alone.masks[number] == together.masks[number]


def test_the_states_do_run_out(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would show nothing. So it is where compiling takes too long for a step to wait."""
    monkeypatch.setattr(grammar_compiler, "RENEW_SECONDS", 0.0)
    texts = Texts(compiler, range(NUM_TEXTS))
    failed = {slot for _ in range(NUM_TOKENS) for slot in texts.step().failed}
    assert failed
    # Later texts have their own states.
    later = Texts(compiler, range(1))
    assert not len(later.step().failed)


def test_a_text_with_too_many_states_of_its_own_fails(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr(matcher, "LIMITS", limits)
    texts = Texts(compiler, range(1))
    assert any(len(texts.step().failed) for _ in range(NUM_TOKENS))
