"""The matchers of all sequences with a grammar, by slot, and the bitmasks of their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from millrace_proto.sequence import Grammar
from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Ids
from millrace_shard.structured_output.grammar.grammar_source import GrammarInvalid
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.mask_computer import (
    Bitmasks,
    GuidedSequence,
    MaskComputer,
    MaskRequest,
    MaskRow,
)
from millrace_shard.structured_output.matcher import Matcher

NUM_COMPILES = 2
NO_GRAMMARS = "this model's tokenizer allows no grammars"


class MaskJob:
    """Bitmasks that a thread computes, or that `result` computes."""

    def __init__(self, take: Callable[[], Bitmasks]) -> None:
        self._take = take

    def result(self) -> Bitmasks:
        """Wait for the bitmasks."""
        try:
            return self._take()
        # A panic of llguidance is no Exception; it must fail the step only.
        except BaseException as error:
            raise RuntimeError(f"masks could not be computed: {error}") from error


class GrammarManager:
    """The sequences with a grammar, by slot. The engine thread calls all methods, and none of them waits.

    One worker thread follows all sequences in the order of the steps.
    """

    def __init__(
        self, compiler: GrammarCompiler | None, vocab_size: int, *, overlap: bool = True
    ) -> None:
        """Without a compiler every sequence with a grammar fails.

        With `overlap` a thread computes masks during the forward pass, else `MaskJob.result` computes them: on CPU the
        forward pass has every core, and another thread delays it by more than the time of a few masks.
        """
        self.compiler = compiler
        self._overlap = overlap
        self._sequences: dict[int, GuidedSequence] = {}
        self._masks = MaskComputer(compiler, vocab_size, overlap=overlap)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._compiles = ThreadPoolExecutor(NUM_COMPILES, thread_name_prefix="grammars")

    def admit(self, slot: int, grammar: Grammar, generated: Ids, *, close_within: int = 0) -> None:
        """Add the sequence in `slot`, whose text so far is `generated`: a replayed sequence continues its text.

        The text is closed within `close_within` tokens, if it is not 0.
        """
        compiled = self._compiles.submit(self._matcher, grammar, generated, close_within)
        self._sequences[slot] = GuidedSequence(grammar, compiled)

    def drop(self, slots: Ints) -> None:
        """Remove the sequences in `slots`, with or without a grammar."""
        for slot in slots.tolist():
            self._sequences.pop(slot, None)

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()

    def close(self) -> None:
        """End the threads after their current work."""
        self._thread.shutdown()
        self._compiles.shutdown()

    def start(self, requests: Sequence[MaskRequest]) -> MaskJob:
        """Start to compute the masks of `requests`, each for an admitted slot, after those of earlier jobs."""
        rows: list[MaskRow] = []
        num_masks = 0
        for request in requests:
            rows.append(MaskRow(request, self._sequences[request.slot], num_masks))
            num_masks += 1 + len(request.drafts)
        if self._overlap:
            return MaskJob(self._thread.submit(self._masks.compute, rows, num_masks).result)
        return MaskJob(partial(self._masks.compute, rows, num_masks))

    def _matcher(self, grammar: Grammar, generated: Ids, close_within: int) -> Matcher:
        if self.compiler is None:
            raise GrammarInvalid(NO_GRAMMARS)
        matcher = self.compiler.matcher(grammar)
        if close_within:
            matcher.limit(close_within, self.compiler.vocabulary)
        if not matcher.consume_all(generated.tolist()):
            raise GrammarInvalid(matcher.error() or "the replayed tokens do not match it")
        return matcher
