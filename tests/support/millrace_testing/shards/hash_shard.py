"""A shard with a KV cache and without a model, whose tokens are hashes of the contents of its blocks.

A computed token is written to a cell of the KV cache through the block table: the token, its position, the request and
step that wrote it, and a digest of its context. A prediction reads all cells through the block table. So a wrong
block, or one that is shared too early, reused too soon or not computed, changes every later token; a wrong position
does too. The rules of `millrace_shard.batch.batch` and of the wire are also checked, each with its own message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile

from millrace_proto import generate_pb2 as pb
from millrace_router.scheduler.window_blocks import WindowGroup
from millrace_testing.adapters.fake_adapters import FakeAdapters
from millrace_testing.shards.fake_images import FakeImages
from millrace_testing.shards.hash_choices import Choices, decode_limits
from millrace_testing.shards.hash_tokens import (
    POISON_TOKEN_ID,
    candidates,
    choose,
    expected_tokens,
    extend,
    fold,
    root,
    score,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """The KV of a position."""

    token_id: int
    position: int
    digest: int
    """Digest of all tokens up to this one."""
    is_finite: bool
    request_id: int
    step: int


@dataclass(frozen=True, slots=True)
class State:
    """What a recurrent layer keeps of all tokens of a context."""

    digest: int
    num_tokens: int
    step: int


TORN = Cell(token_id=-1, position=-1, digest=-1, is_finite=False, request_id=-1, step=0)
"""What a step without an answer may have left."""


@dataclass(slots=True, eq=False)
class Running:
    """A sequence in a slot. Predictions read the KV cache, never `ids`."""

    pb: pb.Sequence
    ids: list[int]
    num_computed: int
    table: list[int] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    """A table for each window group; 0 where it has no block any more."""
    progress: list[tuple[int, int]] = field(default_factory=list)
    """Steps, and the positions that were computed after each."""
    adapter: str = ""
    """The digest in its adapter slot at its admission."""
    is_invalid: bool = False
    """Whether its adapter slot was empty then."""
    has_failed: bool = False
    next_logprob: float = float("nan")


class HashShard:
    """Executes steps in order. After a broken rule, this and every later step raise AssertionError."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_size: int = 16,
        eos_every: int = 0,
        max_draft_tokens: int = 0,
        choices: Choices | None = None,
        adapters: FakeAdapters | None = None,
        windows: tuple[WindowGroup, ...] = (),
        state_pages: int = 0,
        images: FakeImages | None = None,
    ) -> None:
        self.images = images or FakeImages()
        self.state_pages = state_pages
        """Pages of states, page 0 included; 0 if no layer is recurrent."""
        self.adapters = adapters or FakeAdapters()
        self.max_draft_tokens = max_draft_tokens
        self.choices = choices or Choices()
        self.num_blocks = num_blocks
        self.windows = windows
        self._starts = [*accumulate([num_blocks, *(group.num_blocks for group in windows)])]
        """The first number of each window group, and the number after the last one."""
        self.block_size, self.max_batch_size, self.eos_every = block_size, max_batch_size, eos_every
        self.running: dict[int, Running] = {}
        self.answered = 0
        """Number of the last step whose answer the router has read; set by the code that passes the answers on."""
        self.fail_next: str | None = None
        """Error message of the next step."""
        self.fails_with: pb.StepError.Kind.ValueType = pb.StepError.KIND_FAILED
        """The kind of that error."""
        self.corrupt: set[int] = set()
        """Ids of requests whose KV is not finite from now on."""
        self.steps: list[pb.StepRequest] = []
        self.violation: AssertionError | None = None
        # Prompt tokens: computed, and found in the cache.
        self.num_prefilled = self.num_hit = 0
        self.epoch = 0
        self.loses_adapters = False
        """Whether it has lost its adapters when an epoch begins."""
        self._cells: list[list[Cell | None]] = []
        self._states: dict[int, State] = {}  # By page.
        self.keeps_kv = False  # Whether it has its KV cache when an epoch begins.
        self.lives: Iterator[int] | None = None
        """The lives of the router's ledgers, if its KV outlives the shard."""
        self.allows_empty_steps = False
        self.infinite_id: int | None = POISON_TOKEN_ID
        """The KV of every context with this token is not finite."""
        self._begin()

    def _begin(self) -> None:
        self.running.clear()
        self._cells = [self._begun(block) for block in range(self._starts[-1])]
        self._states = self._states_begun()
        self._number = self.answered = 0
        self.has_failed = False
        self._owners: list[set[int]] = [set() for _ in range(self._starts[-1])]
        self.images.begin()
        self._saves: dict[tuple[int, int], int] = {}
        """Pages of the copies that the step takes, by slot and position."""
        self._slot_named = [0] * self.max_batch_size
        self._block_named = [0] * self._starts[-1]

    def _states_begun(self) -> dict[int, State]:
        """The states when an epoch begins; those of unanswered steps may be anything."""
        kept = self._states.items() if self.keeps_kv else ()
        return {page: replace(each, step=0) for page, each in kept if each.step <= self.answered}

    def _begun(self, block: int) -> list[Cell | None]:
        """The cells of a block when an epoch begins: those of unanswered steps may hold anything."""
        if not self.keeps_kv:
            return [None] * self.block_size
        return [
            cell and (replace(cell, step=0) if cell.step <= self.answered else TORN)
            for cell in self._cells[block]
        ]

    def num_acknowledged(self, slot: int) -> int:
        """Positions of the sequence in `slot` that answered steps have computed, from the first one on."""
        blocks = self.running[slot].table
        cells = (cell for block in blocks for cell in self._cells[block])
        return sum(1 for _ in takewhile(lambda cell: cell and cell.step <= self.answered, cells))

    @property
    def adapters_in_use(self) -> set[int]:
        """Adapter slots of all sequences."""
        return {running.pb.adapter_slot for running in self.running.values()}

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        """Check and execute one step."""
        self.steps.append(request)
        try:
            assert self.violation is None, f"after a violation: {self.violation}"
            return self._step(request)
        except AssertionError as violation:
            self.violation = self.violation or violation
            raise

    def _step(self, request: pb.StepRequest) -> pb.StepResponse:
        work = request.WhichOneof("work")
        response = pb.StepResponse(epoch=request.epoch, number=request.number)
        if work == "open":
            assert request.epoch > self.epoch, "an epoch is begun twice"
            self.epoch = request.epoch
            if self.loses_adapters:
                self.adapters.slots.clear()
            self._begin()
            return response
        assert request.epoch == self.epoch, "a step of another epoch"
        assert request.number == self._number + 1, "steps out of order"
        self._number += 1
        if self.has_failed or self.fail_next is not None:
            refused = self.has_failed
            if not refused:
                # It may have done some of its work; an adapter may be what it lacks.
                with suppress(KeyError):
                    self._work(request, pb.StepResponse())
            response.error.kind = pb.StepError.KIND_REFUSED if refused else self.fails_with
            response.error.message = self.fail_next or "an earlier step failed"
            self.has_failed, self.fail_next = True, None
        else:
            self._work(request, response)
        return response

    def _work(self, request: pb.StepRequest, response: pb.StepResponse) -> None:
        """Do the work of a step, which answers `response` unless it fails."""
        work = request.WhichOneof("work")
        if work == "filter_batch":
            assert self.allows_empty_steps or request.filter_batch.dropped_slots, "an empty step"
            self._drop(request.filter_batch.dropped_slots)
        elif work == "prefill":
            assert request.prefill.chunk_slots, "a prefill without chunks"
            chunks = zip(request.prefill.chunk_slots, request.prefill.chunk_tokens, strict=True)
            self._forward(request.prefill, dict(chunks), response)
        elif work == "encode":
            self._drop(request.encode.change.dropped_slots)
            self.images.change(request.encode.change)
            self.images.encode(request.encode, response)
        else:
            self._forward(request.decode, {}, response)

    def _forward(
        self, work: pb.Prefill | pb.Decode, chunks: dict[int, int], response: pb.StepResponse
    ) -> None:
        self._drop(work.change.dropped_slots)
        self.images.change(work.change)
        for sequence in work.change.admitted:
            self._admit(sequence)
        self._grow(work.change)
        saves = zip(work.saved_slots, work.saved_positions, work.saved_pages, strict=True)
        self._saves = {(slot, position): page for slot, position, page in saves}
        named = [*chunks, *work.decode_slots]
        assert named, "a forward pass without rows"
        assert len(set(named)) == len(named), f"a slot is named twice: {named}"
        for slot, count in chunks.items():
            running = self._named(slot)
            if running.is_invalid:
                response.failed_slots.append(slot)
                continue
            left = running.pb.input_ids[running.num_computed :]
            assert 1 <= count <= len(left), f"a chunk of {count} tokens where {len(left)} are left"
            self._compute(running, count)
            self.num_prefilled += count
            self._answer(running, response, count)
            running.progress.append((self._number, running.num_computed))
        limits = decode_limits(work, max_draft_tokens=self.max_draft_tokens)
        for slot, (allowed, draft_tokens) in zip(work.decode_slots, limits, strict=True):
            running = self._named(slot)
            if running.is_invalid:
                response.failed_slots.append(slot)
                continue
            assert running.num_computed >= len(running.pb.input_ids), "a decode before the prompt"
            self._decode(running, allowed, draft_tokens, response)
            running.progress.append((self._number, running.num_computed))

    def _decode(
        self, running: Running, allowed: int, draft_tokens: int, response: pb.StepResponse
    ) -> None:
        sequence, num_named = running.pb, len(response.slots)
        held = min(map(len, (running.table, *running.windows))) * self.block_size
        assert running.num_computed + allowed <= held, "fewer blocks than positions are allowed"
        is_guided = sequence.HasField("grammar")
        assert is_guided or allowed <= 1 + draft_tokens, "positions that nothing can fill"
        count = self.choices.num_filled(min(len(running.ids) - running.num_computed, allowed))
        self._compute(running, count)
        num_draft_tokens = self._answer(running, response, 0, min(draft_tokens, allowed - count))
        if allowed > 1:
            response.computed_slots.append(sequence.slot)
            response.computed_positions.append(running.num_computed)
            response.drafted_tokens.append(num_draft_tokens)
            is_silent = len(response.slots) == num_named and not running.has_failed
            if is_silent and self.choices.says_zero():
                response.slots.append(sequence.slot)
                response.counts.append(0)

    def _named(self, slot: int) -> Running:
        assert slot in self.running, f"no sequence in slot {slot}"
        running = self.running[slot]
        self._slot_named[slot] = self._number
        for block in running.table:
            self._block_named[block] = self._number
        for group, table in zip(self.windows, running.windows, strict=True):
            first = max(0, running.num_computed - group.reach) // self.block_size
            for block in table[first:]:
                self._block_named[block] = self._number
        return running

    def _drop(self, slots: Iterable[int]) -> None:
        for slot in slots:
            assert slot in self.running, f"no sequence to drop in slot {slot}"
            running = self.running.pop(slot)
            for table in (running.table, *running.windows):
                for block in table:
                    self._owners[block].discard(slot)

    def _admit(self, sequence: pb.Sequence) -> None:
        slot, size = sequence.slot, len(sequence.input_ids)
        assert slot < self.max_batch_size, f"slot {slot} is not one of {self.max_batch_size}"
        assert slot not in self.running, f"slot {slot} is in use"
        assert self._slot_named[slot] <= self.answered, (
            f"slot {slot} was named by step {self._slot_named[slot]}, which is not answered"
        )
        assert size >= 1, "an empty sequence"
        assert sequence.cached_tokens < size, "no token is left to compute"
        assert sequence.generated_tokens < size, "a sequence without a prompt"
        ids = list(sequence.input_ids)
        is_valid = self.adapters.is_valid(sequence)
        self.running[slot] = Running(
            sequence,
            ids,
            sequence.cached_tokens,
            windows=[[0] * start for start in sequence.window_starts or [0] * len(self.windows)],
            adapter=self.adapters.digest_for(sequence) if is_valid else "",
            is_invalid=not is_valid,
        )
        self.num_hit += sequence.cached_tokens
        if self.state_pages:
            self._begin_state(self.running[slot])

    def _begin_state(self, running: Running) -> None:
        sequence, pages = running.pb, [each.pb.state_page for each in self.running.values()]
        assert 0 < sequence.state_page < self.state_pages, "no page of states"
        assert pages.count(sequence.state_page) == 1, "two sequences have a page of states"
        if not sequence.cached_tokens:
            assert not sequence.restored_page, "a state is restored for no tokens"
            self._states[sequence.state_page] = State(root(running.adapter), 0, 0)
            return
        copy = self._states[sequence.restored_page]
        assert copy.step <= self.answered, "a state is restored before its step is answered"
        assert copy.num_tokens == sequence.cached_tokens, "a state of another position is restored"
        self._states[sequence.state_page] = copy

    def _change_state(self, running: Running, token_id: int, position: int, before: int) -> None:
        slot, page = running.pb.slot, running.pb.state_page
        state = self._states[page]
        assert (state.digest, state.num_tokens) == (before, position), "the state of other tokens"
        digest = extend(before, token_id, position)
        self._states[page] = State(digest, position + 1, self._number)
        saved = self._saves.pop((slot, position + 1), None)
        if saved is not None:
            working = {each.pb.state_page for each in self.running.values()}
            assert 0 < saved < self.state_pages, "a copy in no page of states"
            assert saved not in working, "a copy in the page of a sequence"
            self._states[saved] = self._states[page]

    def _grow(self, change: pb.BatchChange) -> None:
        for slot, block in zip(change.grown_slots, change.grown_blocks, strict=True):
            assert slot in self.running, f"no sequence to grow in slot {slot}"
            assert 0 < block < self._starts[-1], f"there is no block {block}"
            assert block not in self._starts, f"block {block} is the reserved one of its group"
            running = self.running[slot]
            self._take_back(block)
            assert slot not in self._owners[block], f"block {block} is twice in slot {slot}"
            table = running.table
            if block >= self.num_blocks:
                table = running.windows[bisect_right(self._starts, block) - 1]
            first = len(table) * self.block_size
            table.append(block)
            self._owners[block].add(slot)
            num_cached = min(self.block_size, running.pb.cached_tokens - first)
            if num_cached > 0:
                self._check_hit(running, block, first, num_cached)
            if num_cached == self.block_size:
                continue
            others = self._owners[block] - {slot}
            assert not others, f"block {block}, to be written by slot {slot}, is also of {others}"
            assert self._block_named[block] <= self.answered, (
                f"block {block} was named by step {self._block_named[block]}, which is not answered"
            )
            num_cleared = self.block_size - max(0, num_cached)
            self._cells[block][self.block_size - num_cleared :] = [None] * num_cleared
        for running in self.running.values():
            held = min(map(len, (running.table, *running.windows))) * self.block_size
            assert held >= running.pb.cached_tokens, "cached tokens without their blocks"

    def _take_back(self, block: int) -> None:
        """Take a window block from the sequences that cannot reach it, judging by the answers that the router has."""
        if block < self.num_blocks:
            return
        index = bisect_right(self._starts, block) - 1
        for slot in [*self._owners[block]]:
            running = self.running[slot]
            answered = [count for step, count in running.progress if step <= self.answered]
            position = answered[-1] if answered else running.pb.cached_tokens
            table = running.windows[index]
            at = table.index(block)
            if (at + 1) * self.block_size <= position - self.windows[index].reach:
                table[at] = 0
                self._owners[block].discard(slot)

    def _check_hit(self, running: Running, block: int, first: int, num_cached: int) -> None:
        digest = root(running.adapter)
        for position in range(first + num_cached):
            digest = extend(digest, running.ids[position], position)
            if position < first:
                continue
            cell = self._cells[block][position - first]
            assert cell is not None, f"block {block} is shared before it is computed"
            if self.images.num_rows:
                # The sequence does not say which features a cached placeholder has.
                digest = cell.digest if cell.token_id == running.ids[position] else -1
            assert (cell.position, cell.digest) == (position, digest), (
                f"block {block} holds other tokens than those shared"
            )
            assert cell.step <= self.answered, (
                f"block {block} is shared before step {cell.step}, which computes it, is answered"
            )

    def _compute(self, running: Running, count: int) -> None:
        adapter = self.adapters.digest_for(running.pb)
        assert adapter == running.adapter, "the adapter of a sequence was replaced"
        start = running.num_computed
        running.num_computed += count
        held = min(map(len, (running.table, *running.windows))) * self.block_size
        assert running.num_computed <= held, "a block table too short for its tokens"
        assert running.num_computed <= len(running.ids), "more tokens than there are"
        self.images.check_end(running.pb, running.num_computed)
        for position in range(start, running.num_computed):
            token_id = running.ids[position]
            seen = self.images.token_at(running.pb, position, token_id)
            before = self._read(running, position - 1) if position else None
            self._check_windows(running, position)
            if self.state_pages:
                digest = before.digest if before else root(adapter)
                self._change_state(running, token_id, position, digest)
            cell = Cell(
                token_id=token_id,
                position=position,
                digest=extend(before.digest if before else root(adapter), seen, position),
                is_finite=(before is None or before.is_finite)
                and token_id != self.infinite_id
                and running.pb.request_id not in self.corrupt,
                request_id=running.pb.request_id,
                step=self._number,
            )
            for table in (running.table, *running.windows):
                self._write(running, table[position // self.block_size], cell)

    def _write(self, running: Running, block: int, cell: Cell) -> None:
        owners, offset = self._owners[block], cell.position % self.block_size
        assert owners == {running.pb.slot}, f"block {block} is written while it is of {owners}"
        assert self._cells[block][offset] is None, f"block {block} is written a second time"
        self._cells[block][offset] = cell

    def _check_windows(self, running: Running, position: int) -> None:
        """What a query at `position` reaches in each window is what the sequence has there."""
        for group, table in zip(self.windows, running.windows, strict=True):
            for each in range(max(0, position - group.reach), position):
                cell = self._cells[table[each // self.block_size]][each % self.block_size]
                own = self._read(running, each)
                assert cell is not None, f"position {each} is not in the window of {position}"
                assert (cell.position, cell.digest) == (own.position, own.digest), (
                    f"the window of position {position} has something else at {each}"
                )

    def _read(self, running: Running, position: int) -> Cell:
        block = running.table[position // self.block_size]
        cell = self._cells[block][position % self.block_size]
        assert cell is not None, f"position {position} is read before it is computed"
        return cell

    def _answer(
        self, running: Running, response: pb.StepResponse, num_prompt: int, draft_tokens: int = 0
    ) -> int:
        """Add a computed row to the answer; returns its number of draft tokens, up to `draft_tokens`."""
        cells = [self._read(running, position) for position in range(running.num_computed)]
        sequence = running.pb
        if sequence.prefill_logprobs and num_prompt:
            scores = [score(c.digest) if c.is_finite else float("nan") for c in cells]
            response.prefill_slots.append(sequence.slot)
            response.prefill_counts.append(num_prompt)
            first = running.num_computed - num_prompt
            response.prefill_logprobs.extend([running.next_logprob, *scores[first:-1]])
            running.next_logprob = scores[-1]
            self._answer_candidates(running, response, cells[max(first - 1, 0) : -1], first=first)
        running.has_failed |= not all(cell.is_finite for cell in cells)
        tokens: list[int] = []
        is_complete = running.num_computed == len(running.ids)
        if is_complete and sequence.HasField("pooling") and not running.has_failed:
            seeds = sequence.pooling.logit_ids or (1, 2)
            response.pooled_slots.append(sequence.slot)
            response.pooled_counts.append(len(seeds))
            response.pooled_values.extend(self._choose(running, seed) for seed in seeds)
        elif is_complete:
            draft_tokens = self.choices.num_draft_tokens(draft_tokens)
            tokens = self._forced(running) or self._verified(running, draft_tokens)
            running.ids += tokens
        else:
            draft_tokens = 0
        if running.has_failed:
            response.failed_slots.append(sequence.slot)
        elif tokens:
            response.slots.append(sequence.slot)
            response.counts.append(len(tokens))
            response.ids.extend(tokens)
            response.logprobs.extend([-0.5] * len(tokens))
        return draft_tokens

    def _answer_candidates(
        self, running: Running, response: pb.StepResponse, before: list[Cell], *, first: int
    ) -> None:
        """Add the candidates of the tokens from position `first` on; `before` has the cells before each token."""
        count = running.pb.prefill_top_n_tokens
        response.prefill_top_counts.append(count)
        told = [(0, float("nan"))] * (count if first == 0 else 0)
        told += [pair for cell in before for pair in candidates(cell.digest, count)]
        response.prefill_top_ids.extend(id_ for id_, _ in told)
        response.prefill_top_logprobs.extend(logprob for _, logprob in told)

    def predict(self, running: Running) -> int:
        """The token after the computed positions."""
        return self._choose(running, running.pb.parameters.seed)

    def _choose(self, running: Running, seed: int) -> int:
        folded, sequence = 0, running.pb
        for position in range(running.num_computed):
            folded = fold(folded, self._read(running, position).digest, position)
        original = len(sequence.input_ids) - sequence.generated_tokens
        return choose(
            folded,
            seed=seed,
            num_prompt=original,
            eos_every=self.eos_every,
            may_end=running.num_computed - original >= sequence.min_new_tokens,
        )

    def _forced(self, running: Running) -> list[int]:
        """Jump-forward tokens, which are known without a prediction."""
        sequence = running.pb
        if not sequence.HasField("grammar"):
            return []
        original = len(sequence.input_ids) - sequence.generated_tokens
        num_generated = len(running.ids) - original
        return expected_tokens(
            sequence.input_ids[:original],
            num_generated + self.choices.chain_length(),
            adapter=running.adapter,
            seed=sequence.parameters.seed,
            eos_every=self.eos_every,
            min_new_tokens=sequence.min_new_tokens,
        )[num_generated:]

    def _verified(self, running: Running, num_draft_tokens: int) -> list[int]:
        """Predict after each right draft token too. All are written; those after a wrong one are erased."""
        num_ids, tokens, are_right = len(running.ids), [self.predict(running)], True
        for _ in range(num_draft_tokens):
            is_right = self.choices.is_right()
            running.ids.append(tokens[-1] if is_right else (tokens[-1] + 1) % 90)
            self._compute(running, 1)
            are_right &= is_right
            if are_right:
                tokens.append(self.predict(running))
        num_computed = num_ids + len(tokens) - 1
        for position in range(num_computed, running.num_computed):
            for table in (running.table, *running.windows):
                self._cells[table[position // self.block_size]][position % self.block_size] = None
        running.num_computed = num_computed
        del running.ids[num_ids:]
        return tokens
