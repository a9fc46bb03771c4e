"""Which tokens the grammars of running sequences allow: masks computed on the host while the forward pass runs.

One worker thread follows all sequences, in the order of the steps: a token costs it microseconds under the
interpreter's lock, and the masks of all rows are then filled together (`mask_filler.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Grammar, Ids
from millrace_shard.structured_output.grammar.grammar_source import GrammarInvalid
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.mask_filler import Bits, MaskFiller, MaskLines
from millrace_shard.structured_output.matcher import Lexer, Matcher

NUM_COMPILES = 2
MOST_RENEWED = 2
"""Lexers that a row may turn to in a step: the first may be one that others have filled as well."""
NO_GRAMMARS = "this model's tokenizer allows no grammars"

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class GuidedRow:
    """A sequence with a grammar that samples in the step about to be launched."""

    slot: int
    news: Callable[[], Sequence[int]]
    """Tokens sampled since the last step that named this slot, forced ones left out; may wait for the device."""
    drafts: Sequence[int] = ()
    max_jump_forward_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """What each row may sample, at each of its positions."""

    bits: Bits
    """[M, ceil(V / 32)]: bit i of word j allows id 32 j + i. 1 + len(drafts) masks for each row, in order of the rows;
    all ones after a guess that is not allowed, and for rows that failed. Those of the next step overwrite them."""
    forced: tuple[tuple[int, ...], ...]
    """By row: tokens that were each the only one allowed, at most `max_jump_forward_tokens`."""
    failed: Mapping[int, str]
    """Slots whose matcher cannot go on, and why."""


@dataclass(slots=True, eq=False)
class _Guide:
    """A sequence's matcher, once it is compiled and has replayed what was generated earlier."""

    grammar: Grammar
    compiled: Future[Matcher]
    matcher: Matcher | None = None
    """What has come of `compiled`, without its lock; None until a step has asked."""
    failure: str | None = None
    """Why it cannot go on."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row while its masks are computed."""

    request: GuidedRow
    guide: _Guide
    first: int
    """Where in the masks its own begin."""
    matcher: Matcher | None = None
    """None once it has failed."""
    forced: tuple[int, ...] = ()
    num_renewed: int = 0


class MaskJob:
    """Masks that are being computed, or will be when they are asked for."""

    def __init__(self, take: Callable[[], Masks]) -> None:
        self._take = take

    def result(self) -> Masks:
        """Wait for the masks."""
        try:
            return self._take()
        # llguidance's panics are no Exceptions; whatever it is fails the step and no more.
        except BaseException as error:
            raise RuntimeError(f"masks could not be computed: {error}") from error


class GrammarManager:
    """The matchers of guided sequences, by slot. Its methods are the engine thread's and wait for nothing."""

    def __init__(
        self, compiler: GrammarCompiler | None, vocab_size: int, *, beside: bool = True
    ) -> None:
        """Without a compiler every guided sequence fails, alone.

        Masks are computed `beside` the forward pass, or else when they are asked for: where the forward pass has every
        core already, a thread beside it holds up all of its threads for longer than a few masks take.
        """
        self.compiler = compiler
        self._beside = beside
        self._width = -(-vocab_size // 32)
        self._guides: dict[int, _Guide] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._compiles = ThreadPoolExecutor(NUM_COMPILES, thread_name_prefix="grammars")
        self._filler = MaskFiller(beside=beside)
        self._lines = MaskLines(1, self._width)
        self._chain_lines = MaskLines(1, self._width)
        """Of masks within chains, which nobody else reads."""
        self._ends = np.zeros(self._width, dtype=np.int32)
        if compiler is not None:
            self._ends = _bits(compiler.vocabulary.eos_token_ids, self._width)

    def admit(self, slot: int, grammar: Grammar, generated: Ids) -> None:
        """Begin to guide `slot`, whose text so far is `generated`: a replayed sequence goes on where it was."""
        compiled = self._compiles.submit(self._begin, grammar, generated)
        self._guides[slot] = _Guide(grammar, compiled)

    def drop(self, slots: Ints) -> None:
        """Forget `slots`, guided or not."""
        for slot in slots.tolist():
            self._guides.pop(slot, None)

    def clear(self) -> None:
        """Forget all."""
        self._guides.clear()

    def close(self) -> None:
        """End the threads once they have done what was begun."""
        self._threads.shutdown()
        self._compiles.shutdown()

    def start(self, rows: Sequence[GuidedRow]) -> MaskJob:
        """Begin to compute the masks of `rows`, each of an admitted slot, after those of all jobs before."""
        work = []
        num_masks = 0
        for row in rows:
            work.append(_Row(row, self._guides[row.slot], num_masks))
            num_masks += 1 + len(row.drafts)
        if self._beside:
            return MaskJob(self._threads.submit(self._compute, work, num_masks).result)
        return MaskJob(partial(self._compute, work, num_masks))

    def _begin(self, grammar: Grammar, generated: Ids) -> Matcher:
        if self.compiler is None:
            raise GrammarInvalid(NO_GRAMMARS)
        matcher = self.compiler.matcher(grammar)
        if not matcher.consume_all(generated.tolist()):
            raise GrammarInvalid(matcher.error() or "what was generated earlier does not match it")
        return matcher

    def _compute(self, rows: list[_Row], num_masks: int) -> Masks:
        if len(self._lines) < num_masks:
            self._lines = MaskLines(num_masks, self._width)
        lines, bits = self._lines, self._lines.bits[:num_masks]
        has_drafts = num_masks > len(rows)
        if has_drafts:
            bits[:] = -1
        for row in rows:
            self._catch_up(row)
        self._fill([(row, row.first) for row in rows], lines)
        self._follow_chains(rows, bits)
        if has_drafts:
            self._follow_drafts(rows, lines)
        failed = [row for row in rows if row.matcher is None]
        for row in failed:
            bits[row.first : row.first + 1 + len(row.request.drafts)] = -1
        reasons = {row.request.slot: row.guide.failure or "" for row in failed}
        return Masks(bits, tuple([row.forced for row in rows]), reasons)

    def _catch_up(self, row: _Row) -> None:
        """Find the row's matcher and feed it what was sampled meanwhile; a row that cannot go on fails alone."""
        guide = row.guide
        news = row.request.news()
        if guide.failure is not None:
            return
        if guide.matcher is None:
            if (error := guide.compiled.exception()) is not None:
                self._fail(row, str(error))
                return
            guide.matcher = guide.compiled.result()
        row.matcher = guide.matcher
        for token in news:
            if not self._consume(row, int(token)):
                self._fail(row, _error(row) or f"token {token} does not match")
                return

    def _fill(self, places: Sequence[tuple[_Row, int]], lines: MaskLines) -> None:
        """Write the masks of rows as they stand to these of the `lines`; rows without any fail."""
        asked, bits = [], lines.bits
        for row, index in places:
            if row.matcher is None:
                continue
            if row.matcher.has_ended:
                bits[index] = self._ends
            else:
                asked.append((row, row.matcher, index))
        self._filler.fill([(matcher.inner, index) for _, matcher, index in asked], lines)
        for row, matcher, index in asked:
            error = matcher.error()
            while error is not None and (renewed := self._renew(row)) is not None:
                self._filler.fill([(renewed.inner, index)], lines)
                error = renewed.error()
            if error is not None:
                bits[index] = -1
                self._fail(row, error)

    def _follow_chains(self, rows: Sequence[_Row], bits: Bits) -> None:
        """Feed the rows what is forced, a token each at a time, until more than one is allowed or the text ends."""
        following = [
            row
            for row in rows
            if row.request.max_jump_forward_tokens
            and row.matcher is not None
            and not row.matcher.has_ended
        ]
        current = bits
        if len(following) < len(bits):
            current = bits[[row.first for row in following]]
        if len(self._chain_lines) < len(following):
            self._chain_lines = MaskLines(len(following), self._width)
        while following := self._forced_by(current, following):
            self._fill([(row, line) for line, row in enumerate(following)], self._chain_lines)
            current = self._chain_lines.bits[: len(following)]

    def _forced_by(self, masks: Bits, rows: Sequence[_Row]) -> list[_Row]:
        """Feed each of `rows` the one token that its mask allows; those in whose chain another one may follow."""
        return [rows[line] for line, token in _only_tokens(masks) if self._force(rows[line], token)]

    def _force(self, row: _Row, token: int) -> bool:
        """Append `token` to the chain; whether another one may follow."""
        if not self._consume(row, token):
            self._fail(row, _error(row) or f"token {token} is forced and does not match")
            return False
        row.forced = (*row.forced, token)
        matcher = row.matcher
        if matcher is None or matcher.has_ended:
            return False
        return len(row.forced) < row.request.max_jump_forward_tokens

    def _follow_drafts(self, rows: Sequence[_Row], lines: MaskLines) -> None:
        """Masks after each guess while the guesses are allowed; the matchers then stand where they stood."""
        guessing = [row for row in rows if row.request.drafts and not row.forced]
        marks = [(row, row.matcher.mark()) for row in guessing if row.matcher is not None]
        depth = 0
        while guessing:
            masks = lines.bits[depth:]
            guessing = [row for row in guessing if self._guess(row, masks[row.first], depth)]
            depth += 1
            self._fill([(row, row.first + depth) for row in guessing], lines)
        for row, mark in marks:
            if row.matcher is not None and not row.matcher.return_to(mark):
                self._fail(row, row.matcher.error() or "guesses could not be taken back")

    def _guess(self, row: _Row, mask: Bits, depth: int) -> bool:
        """Feed the guess at `depth` if there is one that `mask` allows; whether so."""
        drafts = row.request.drafts
        if row.matcher is None or depth >= len(drafts) or not _allows(mask, drafts[depth]):
            return False
        if not self._consume(row, drafts[depth]):
            self._fail(row, _error(row) or "a guess that is allowed does not match")
            return False
        return True

    def _consume(self, row: _Row, token: int) -> bool:
        """Whether the row's matcher has gone on by `token`."""
        if row.matcher is None:
            return False
        return row.matcher.consume(token) or (
            (renewed := self._renew(row)) is not None and renewed.consume(token)
        )

    def _renew(self, row: _Row) -> Matcher | None:
        """Have a row go on with another lexer where the states of its own have run out; None where it cannot.

        Many share a lexer. What they have generated must not decide whether this row fails.
        """
        stale = failed = row.matcher
        while failed is not None and failed.is_exhausted() and row.num_renewed < MOST_RENEWED:
            row.num_renewed += 1
            renewed = self._renewed(row.guide.grammar, failed.lexer)
            if renewed is None or stale is None:
                break
            if renewed.follow(stale):
                row.matcher = row.guide.matcher = renewed
                return renewed
            failed = renewed
        return None

    def _renewed(self, grammar: Grammar, lexer: Lexer) -> Matcher | None:
        try:
            return None if self.compiler is None else self.compiler.renewed(grammar, lexer)
        except GrammarInvalid:
            return None

    def _fail(self, row: _Row, reason: str) -> None:
        logger.error("the grammar in slot %d cannot go on: %s", row.request.slot, reason)
        row.guide.failure = reason
        row.matcher = None
        row.forced = ()


def _error(row: _Row) -> str | None:
    return None if row.matcher is None else row.matcher.error()


def _bits(ids: Sequence[int], width: int) -> Bits:
    """[width]: a mask of these ids."""
    allowed = np.zeros(width * 32, dtype=np.bool_)
    allowed[list(ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def _allows(mask: Bits, token: int) -> bool:
    return 0 <= token < mask.size * 32 and bool(mask[token >> 5] >> (token & 31) & 1)


def _only_tokens(masks: Bits) -> list[tuple[int, int]]:
    """Lines of `masks` [N, W] that allow one token and no other, and that token."""
    found = []
    octets, size = masks.tobytes(), masks.shape[1] * masks.itemsize
    for line in range(len(masks)):
        mask = octets[line * size : (line + 1) * size]
        # From both ends: a mask of many tokens is hardly read.
        rest = mask.strip(b"\0")
        if len(rest) == 1 and rest[0].bit_count() == 1:
            found.append((line, 8 * mask.index(rest) + rest[0].bit_length() - 1))
    return found
