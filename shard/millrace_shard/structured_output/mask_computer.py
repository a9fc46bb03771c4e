"""Computes the bitmasks of a step: the tokens that the grammars of its sequences allow."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from millrace_proto.sequence import Grammar
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.matcher import Matcher

Bits = NDArray[np.int32]

NUM_THREADS = 2
"""Most masks take 2 to 20 us, so that more threads would only take cores from the forward pass."""
NUM_SHARED = 4
"""The least number of masks for which threads may be faster."""
ALONE_SECONDS = 0.5e-3
"""Time of one thread before others help: to wake threads costs as much while the forward pass has every core."""


class MaskLines:
    """[M, W] int32 at a fixed address.

    To create an array and to find its address takes longer than most masks, especially while the forward pass fills
    the caches.
    """

    def __init__(self, num_lines: int, width: int) -> None:
        self.bits: Bits = np.empty((num_lines, width), dtype=np.int32)
        self.address = self.bits.ctypes.data
        self.num_bytes = self.bits.strides[0]
        """Bytes of a line."""

    def __len__(self) -> int:
        return len(self.bits)


class MaskFiller:
    """Fills masks for one thread at a time. The number of threads does not change a mask."""

    def __init__(self, *, overlap: bool) -> None:
        """With `overlap` another thread needs the interpreter, so that threads fill `NUM_SHARED` masks or more."""
        self._alone_seconds = 0.0 if overlap else ALONE_SECONDS
        self._executor = LLExecutor(NUM_THREADS)

    def fill(self, matchers: Sequence[tuple[LLMatcher, int]], lines: MaskLines) -> None:
        """Fill the mask of each matcher into its line, which must exist.

        The calling thread fills masks with the interpreter lock until this has taken too long; threads fill the rest.
        """
        address, num_bytes, num_lines = lines.address, lines.num_bytes, len(lines)
        until = perf_counter() + self._alone_seconds
        for index, (matcher, line) in enumerate(matchers):
            if len(matchers) - index >= NUM_SHARED and perf_counter() >= until:
                fill_next_token_bitmask_par(self._executor, list(matchers[index:]), lines.bits)
                return
            assert 0 <= line < num_lines
            matcher.unsafe_compute_mask_ptr(address + line * num_bytes, num_bytes)


def bits_of(ids: Sequence[int], width: int) -> Bits:
    """[width]: the mask of `ids`."""
    allowed = np.zeros(width * 32, dtype=np.bool_)
    allowed[list(ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def allows(mask: Bits, token: int) -> bool:
    return 0 <= token < mask.size * 32 and bool(mask[token >> 5] >> (token & 31) & 1)


def only_tokens(masks: Bits) -> list[tuple[int, int]]:
    """The lines of `masks` [N, W] that allow exactly one token, with this token."""
    forced = []
    octets, size = masks.tobytes(), masks.shape[1] * masks.itemsize
    for line in range(len(masks)):
        mask = octets[line * size : (line + 1) * size]
        # From both ends, so that most bytes of a mask with many tokens are not read.
        rest = mask.strip(b"\0")
        if len(rest) == 1 and rest[0].bit_count() == 1:
            forced.append((line, 8 * mask.index(rest) + rest[0].bit_length() - 1))
    return forced


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _heap_reader() -> Callable[[], int]:
    """A function for the bytes that `malloc` has given out, in 2 us; 0 where the C library does not count them."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return lambda: 0
    read.restype = _HeapInfo

    def heap_bytes() -> int:
        info = read()
        return int(info.uordblks + info.hblkhd)

    return heap_bytes


heap_bytes = _heap_reader()
ROW_BYTES = 1024
"""Memory that a row may take in a step for its own text; what exceeds it are new states of lexers."""
MAX_RENEWED = 2
"""Lexers that a row may change to in a step: other sequences may have filled the first one too."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class MaskRequest:
    """A sequence with a grammar that samples in the next step."""

    slot: int
    new_tokens: Callable[[], Sequence[int]]
    """Tokens sampled since the last step with this slot, except forced ones; may wait for the device."""
    drafts: Sequence[int] = ()
    max_jump_forward_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Bitmasks:
    """The tokens that each row may sample at each of its positions."""

    bits: Bits
    """[M, ceil(V / 32)]: bit i of word j allows id 32 j + i. Each row has 1 + len(drafts) masks, in the order of rows;
    they are all ones after a draft token that is not allowed, and for failed rows. The next step overwrites them."""
    forced: tuple[tuple[int, ...], ...]
    """The jump-forward tokens of each row, at most `max_jump_forward_tokens`: each was the only allowed token."""
    failed: Mapping[int, str]
    """The reason for each slot whose grammar no token can follow."""
    num_open: tuple[int | None, ...]
    """The tokens of each row before those that close its text; None where the text is not closed."""


@dataclass(slots=True, eq=False)
class GuidedSequence:
    """A sequence with a grammar, and its matcher."""

    grammar: Grammar
    compiled: Future[Matcher]
    """The matcher, once it is compiled and has consumed the replayed tokens."""
    matcher: Matcher | None = None
    """The result of `compiled`, without its lock; None before the first step."""
    failure: str | None = None
    """The reason if no token can follow."""


@dataclass(slots=True, eq=False)
class MaskRow:
    """A row while its masks are computed."""

    request: MaskRequest
    sequence: GuidedSequence
    first: int
    """The line of its first mask."""
    matcher: Matcher | None = None
    """None once the row has failed."""
    forced: tuple[int, ...] = ()
    num_ahead: int = 0
    """Tokens of this step that its matcher has consumed."""
    num_open: int | None = None
    """The part of `num_ahead` before the text was closed; None if it is not closed."""
    num_renewed: int = 0


class MaskComputer:
    """Feeds matchers with tokens and fills masks. One thread at a time uses it, in the order of the steps.

    A token costs a matcher microseconds under the interpreter lock; all masks of a step are then filled together.
    """

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int, *, overlap: bool) -> None:
        """`compiler` renews lexers; with `overlap` the forward pass needs the interpreter at the same time."""
        self._compiler = compiler
        self._width = -(-vocab_size // 32)
        self._filler = MaskFiller(overlap=overlap)
        self._lines = MaskLines(1, self._width)
        self._jump_lines = MaskLines(1, self._width)
        """Masks between jump-forward tokens, which are not part of the result."""
        ends = () if compiler is None else compiler.vocabulary.eos_token_ids
        self._ends = bits_of(ends, self._width)

    def compute(self, rows: list[MaskRow], num_masks: int) -> Bitmasks:
        before = heap_bytes()
        masks = self._compute(rows, num_masks)
        grown = heap_bytes() - before - ROW_BYTES * len(rows)
        if grown > 0:
            # Rows of one step share what was measured: which of them reached new states is not known.
            lexers = {row.matcher.lexer for row in rows if row.matcher is not None}
            for lexer in lexers:
                lexer.state_bytes += grown // len(lexers)
        return masks

    def _compute(self, rows: list[MaskRow], num_masks: int) -> Bitmasks:
        if len(self._lines) < num_masks:
            self._lines = MaskLines(num_masks, self._width)
        lines, bits = self._lines, self._lines.bits[:num_masks]
        has_drafts = num_masks > len(rows)
        if has_drafts:
            bits[:] = -1
        for row in rows:
            self._catch_up(row)
        self._fill([(row, row.first) for row in rows], lines)
        self._jump_forward(rows, bits)
        if has_drafts:
            self._consume_drafts(rows, lines)
        failed = [row for row in rows if row.matcher is None]
        for row in failed:
            bits[row.first : row.first + 1 + len(row.request.drafts)] = -1
        reasons = {row.request.slot: row.sequence.failure or "" for row in failed}
        forced = tuple([row.forced for row in rows])
        return Bitmasks(bits, forced, reasons, tuple([row.num_open for row in rows]))

    def _catch_up(self, row: MaskRow) -> None:
        """Feed the row's matcher with its new tokens; a row that they do not match fails."""
        sequence = row.sequence
        new_tokens = row.request.new_tokens()
        if sequence.failure is not None:
            return
        if sequence.matcher is None:
            if (error := sequence.compiled.exception()) is not None:
                _fail(row, str(error))
                return
            sequence.matcher = sequence.compiled.result()
        row.matcher = sequence.matcher
        for token in new_tokens:
            if not self._consume(row, int(token)):
                _fail(row, _error(row) or f"token {token} does not match")
                return

    def _fill(self, mask_rows: Sequence[tuple[MaskRow, int]], lines: MaskLines) -> None:
        """Fill the mask of each row, in its current state, into its line; a row without a mask fails."""
        pending, bits = [], lines.bits
        for row, index in mask_rows:
            if row.matcher is None:
                continue
            if row.matcher.has_ended:
                bits[index] = self._ends
            elif (closing := row.matcher.look()) is not None:
                bits[index] = bits_of([closing], self._width)
                if row.num_open is None:
                    row.num_open = row.num_ahead
            else:
                pending.append((row, row.matcher, index))
        self._filler.fill([(matcher.inner, index) for _, matcher, index in pending], lines)
        for row, matcher, index in pending:
            error = matcher.error()
            while error is not None and (renewed := self._renew(row)) is not None:
                self._filler.fill([(renewed.inner, index)], lines)
                error = renewed.error()
            if error is not None:
                bits[index] = -1
                _fail(row, error)

    def _jump_forward(self, rows: Sequence[MaskRow], bits: Bits) -> None:
        """Feed rows their forced tokens one by one, until several tokens are allowed or the text ends."""
        jumping = [
            row
            for row in rows
            if row.request.max_jump_forward_tokens
            and row.matcher is not None
            and not row.matcher.has_ended
        ]
        current = bits
        if len(jumping) < len(bits):
            current = bits[[row.first for row in jumping]]
        if len(self._jump_lines) < len(jumping):
            self._jump_lines = MaskLines(len(jumping), self._width)
        while jumping := self._forced_by(current, jumping):
            self._fill([(row, line) for line, row in enumerate(jumping)], self._jump_lines)
            current = self._jump_lines.bits[: len(jumping)]

    def _forced_by(self, masks: Bits, rows: Sequence[MaskRow]) -> list[MaskRow]:
        """Feed each of `rows` the only token of its mask, if it has only one; returns rows that may have more."""
        return [rows[line] for line, token in only_tokens(masks) if self._force(rows[line], token)]

    def _force(self, row: MaskRow, token: int) -> bool:
        """Add a forced token; returns whether another one may follow."""
        if not self._consume(row, token):
            _fail(row, _error(row) or f"the forced token {token} does not match")
            return False
        row.forced = (*row.forced, token)
        row.num_ahead += 1
        matcher = row.matcher
        if matcher is None or matcher.has_ended:
            return False
        return len(row.forced) < row.request.max_jump_forward_tokens

    def _consume_drafts(self, rows: Sequence[MaskRow], lines: MaskLines) -> None:
        """Fill the masks after draft tokens as long as these are allowed, then reset the matchers."""
        drafting = [row for row in rows if row.request.drafts and not row.forced]
        marks = [(row, row.matcher.mark()) for row in drafting if row.matcher is not None]
        depth = 0
        while drafting:
            masks = lines.bits[depth:]
            drafting = [
                row for row in drafting if self._consume_draft(row, masks[row.first], depth)
            ]
            depth += 1
            self._fill([(row, row.first + depth) for row in drafting], lines)
        for row, mark in marks:
            if row.matcher is not None and not row.matcher.return_to(mark):
                _fail(row, row.matcher.error() or "the matcher could not return to its state")

    def _consume_draft(self, row: MaskRow, mask: Bits, depth: int) -> bool:
        """Feed the draft token at `depth` if there is one and `mask` allows it; returns whether."""
        drafts = row.request.drafts
        if row.matcher is None or depth >= len(drafts) or not allows(mask, drafts[depth]):
            return False
        if not self._consume(row, drafts[depth]):
            _fail(row, _error(row) or "an allowed draft token does not match")
            return False
        row.num_ahead += 1
        return True

    def _consume(self, row: MaskRow, token: int) -> bool:
        if row.matcher is None:
            return False
        return row.matcher.consume(token) or (
            (renewed := self._renew(row)) is not None and renewed.consume(token)
        )

    def _renew(self, row: MaskRow) -> Matcher | None:
        """Give the row a matcher with another lexer if its lexer has no room for states; None if that fails.

        All sequences of a grammar share a lexer, and the texts of others must not let this row fail.
        """
        stale = failed = row.matcher
        while failed is not None and failed.is_exhausted() and row.num_renewed < MAX_RENEWED:
            row.num_renewed += 1
            renewed = self._renewed(row.sequence.grammar, failed)
            if renewed is None or stale is None:
                break
            if stale.closing is not None and self._compiler is not None:
                renewed.limit(stale.closing.limit, self._compiler.vocabulary)
            if renewed.follow(stale):
                row.matcher = row.sequence.matcher = renewed
                return renewed
            failed = renewed
        return None

    def _renewed(self, grammar: Grammar, failed: Matcher) -> Matcher | None:
        try:
            return None if self._compiler is None else self._compiler.renewed(grammar, failed.lexer)
        except GrammarInvalid:
            return None


def _fail(row: MaskRow, reason: str) -> None:
    logger.error("the grammar in slot %d fails: %s", row.request.slot, reason)
    row.sequence.failure = reason
    row.matcher = None
    row.forced = ()


def _error(row: MaskRow) -> str | None:
    return None if row.matcher is None else row.matcher.error()
