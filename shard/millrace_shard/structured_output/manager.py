"""The matchers of all sequences with a grammar, by slot, and the bitmasks of their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from millrace_proto.sequence import Grammar
from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Ids, Sequence
from millrace_shard.batch.step_layout import DraftTokens, StepLayout
from millrace_shard.batch.step_tokens import ForcedTokens, StepTokens
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.scores import RowMasks
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.grammar_source import GrammarInvalid
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
        for slot in slots.tolist():
            self._sequences.pop(slot, None)

    def clear(self) -> None:
        self._sequences.clear()

    def close(self) -> None:
        self._thread.shutdown()
        self._compiles.shutdown()

    def start(self, requests: Many[MaskRequest]) -> MaskJob:
        """Start to compute the masks of `requests`, each for an admitted slot, after all earlier jobs."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GrammarConstraints:
    """The constraints of all grammars in one step."""

    masks: RowMasks | None = None
    forced: ForcedTokens
    failed: Mapping[int, str]
    """The reason for each slot whose grammar no token can follow."""
    num_open: Mapping[int, int]
    """The tokens of a row before those that close its text, for rows that are closed."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingConstraints:
    """Masks that are computed while the forward pass runs."""

    job: MaskJob
    yields: tuple[int, ...]
    """Indexes of the rows with a grammar among the rows that sample."""
    samples: Ints
    """[M], index of the sample of each mask."""

    def result(self, device: torch.device) -> GrammarConstraints:
        """Wait for the masks and copy them to `device`."""
        masks = self.job.result()
        # On CPU the step reads them before the next step overwrites them, so that no copy is needed.
        is_host = device.type == "cpu"
        bits = torch.from_numpy(masks.bits) if is_host else upload(masks.bits, device)
        return GrammarConstraints(
            masks=RowMasks(rows=self.samples, bits=bits),
            forced={
                row: tokens
                for row, tokens in zip(self.yields, masks.forced, strict=True)
                if len(tokens)
            },
            failed=masks.failed,
            num_open={
                row: num
                for row, num in zip(self.yields, masks.num_open, strict=True)
                if num is not None
            },
        )


class StepMasks:
    """Requests masks for the steps of a batch; only the engine thread uses it."""

    def __init__(self, grammars: GrammarManager | None) -> None:
        """Without `grammars` no sequence may have a grammar."""
        self._grammars = grammars
        self._new_tokens: dict[int, list[tuple[StepTokens, int]]] = {}
        """For each slot with a grammar, the steps whose tokens its matcher lacks, and its row in each of them."""

    def admit(self, sequence: Sequence) -> bool:
        """Start to create the matcher of a sequence, if it has a grammar; False if it cannot have one."""
        self._new_tokens.pop(sequence.slot, None)
        if sequence.grammar is None:
            return True
        if self._grammars is None:
            return False
        num_prompt = sequence.num_inputs - sequence.generated_tokens
        self._new_tokens[sequence.slot] = []
        self._grammars.admit(
            sequence.slot,
            sequence.grammar,
            sequence.input_ids[num_prompt:],
            close_within=sequence.close_within,
        )
        return True

    def drop(self, slots: Ints) -> None:
        guided = [slot for slot in slots.tolist() if self._new_tokens.pop(slot, None) is not None]
        if guided and self._grammars is not None:
            self._grammars.drop(np.array(guided, dtype=np.int64))

    def clear(self) -> None:
        self._new_tokens.clear()
        if self._grammars is not None:
            self._grammars.clear()

    def start(self, layout: StepLayout, drafts: DraftTokens) -> PendingConstraints | None:
        """Start to compute the masks of a step; None if no sampling row has a grammar.

        A row may have as many forced tokens as it may yield.
        """
        if self._grammars is None or not self._new_tokens:
            return None
        slots = layout.yield_slots.tolist()
        guided = [row for row, slot in enumerate(slots) if slot in self._new_tokens]
        if not guided:
            return None
        max_new_tokens = layout.max_new_tokens.tolist()
        requests = [
            MaskRequest(
                slot=slots[row],
                new_tokens=self._take_new_tokens(slots[row]),
                max_jump_forward_tokens=max_new_tokens[row],
            )
            for row in guided
        ]
        samples = np.array(guided)
        if len(layout.sampled) > len(slots):
            for request, row in zip(requests, guided, strict=True):
                request.drafts = drafts.of_row(int(layout.yields[row]))
            is_guided = np.isin(np.arange(len(slots)), samples)
            samples = np.flatnonzero(np.repeat(is_guided, layout.num_samples))
        return PendingConstraints(self._grammars.start(requests), tuple(guided), samples)

    def follow(self, tokens: StepTokens) -> None:
        """A step was launched. Its forced tokens come from the matchers, which need only the other ones."""
        if not self._new_tokens:
            return
        for row, slot in enumerate(tokens.layout.yield_slots.tolist()):
            if slot in self._new_tokens and row not in tokens.forced:
                self._new_tokens[slot].append((tokens, row))

    def _take_new_tokens(self, slot: int) -> Callable[[], Many[int]]:
        """A function for a worker thread that reads the tokens sampled since the last call."""
        steps = self._new_tokens[slot]
        if not steps:
            return tuple
        self._new_tokens[slot] = []
        if len(steps) == 1:
            ((tokens, row),) = steps
            return partial(tokens.of_row, row)
        return lambda: [id_ for tokens, row in steps for id_ in tokens.of_row(row)]
