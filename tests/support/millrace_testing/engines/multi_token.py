"""Sequences whose decodes may fill several positions, stepped as by a router, with fake drafts and grammars."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from millrace_proto.sampling import Sampling
from millrace_proto.sequence import Grammar, GrammarKind
from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Ids
from millrace_shard.batch.sequence import Sequence as Admitted
from millrace_shard.batch.step import BatchChange, Forward, StepResult
from millrace_shard.batch.step_layout import DraftTokens, StepRows
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_shard.models.load import load_model
from millrace_shard.speculation.loading import SpeculationLoader
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.structured_output.manager import GrammarManager, MaskJob
from millrace_shard.structured_output.mask_computer import Bitmasks, MaskRequest
from millrace_testing.engines.steps import MAX_TOKENS, Stepper, ints

Allow = Callable[[int], tuple[int, int]]
"""Positions and draft tokens that the decode of a slot may have in the next step."""
CPU = torch.device("cpu")


@dataclass
class Yielded:
    """The outputs of a sequence so far."""

    ids: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    """The bits of log probabilities."""
    tops: list[list[tuple[int, int]]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    """KV positions that the answers reported."""


@dataclass
class Want:
    """A sequence to be generated."""

    prompt: Sequence[int]
    fields: Mapping[str, Any] = field(default_factory=dict)
    top_n_tokens: int = 0
    grammar: Grammar | None = None


class Generation:
    """Runs sequences to `num_tokens` each. With `depth` 2 a step is launched before the one before is finished."""

    def __init__(
        self,
        stepper: Stepper,
        wants: Mapping[int, Want],
        num_tokens: int,
        *,
        allow: Allow = lambda _: (1, 0),
        chunk: int = 1000,
        depth: int = 1,
    ) -> None:
        self.yielded = {slot: Yielded() for slot in wants}
        self.drafted = self.accepted = self.steps = 0
        self._stepper = stepper
        self._wants = wants
        self._num_tokens = num_tokens
        self._allow = allow
        self._chunk = chunk
        self._left = {slot: len(want.prompt) for slot, want in wants.items()}
        flying: deque[tuple[Forward, LaunchedStep]] = deque()
        change = self._admission()
        with torch.inference_mode():
            while (step := self._next(change)) is not None or flying:
                if step is not None:
                    flying.append((step, stepper.runner.launch(step)))
                    change = BatchChange()
                if len(flying) == depth or step is None:
                    done, launched = flying.popleft()
                    self._take(done, launched.finish())
            stepper.runner.drop(ints(wants))
        for yielded in self.yielded.values():
            del yielded.ids[num_tokens:], yielded.bits[num_tokens:], yielded.tops[num_tokens:]

    def _admission(self) -> BatchChange:
        size, free = self._stepper.block_size, iter(self._stepper.free)
        grown = []
        for slot, want in self._wants.items():
            room = min(len(want.prompt) + self._num_tokens + 16, MAX_TOKENS)
            grown += [(slot, next(free)) for _ in range(-(-room // size))]
        return BatchChange(
            admitted=tuple(
                Admitted(
                    slot=slot,
                    request_id=slot,
                    state_page=1 + slot,
                    input_ids=ints(want.prompt),
                    parameters=Sampling(**want.fields),
                    top_n_tokens=want.top_n_tokens,
                    grammar=want.grammar,
                )
                for slot, want in self._wants.items()
            ),
            grown_slots=ints(slot for slot, _ in grown),
            grown_blocks=ints(block for _, block in grown),
        )

    def _next(self, change: BatchChange) -> Forward | None:
        going = [
            slot for slot, yielded in self.yielded.items() if len(yielded.ids) < self._num_tokens
        ]
        chunks = {slot: min(self._chunk, self._left[slot]) for slot in going if self._left[slot]}
        decodes = [slot for slot in going if not self._left[slot]]
        if not going:
            return None
        for slot, count in chunks.items():
            self._left[slot] -= count
        allowed = [self._allow(slot) for slot in decodes]
        self.steps += 1
        return Forward(
            change=change,
            chunk_slots=ints(chunks),
            chunk_tokens=ints(chunks.values()),
            decode_slots=ints(decodes),
            decode_tokens=ints(positions for positions, _ in allowed),
            draft_tokens=ints(drafts for _, drafts in allowed),
        )

    def _take(self, step: Forward, result: StepResult) -> None:
        assert not len(result.failed_slots), result.failed_slots
        assert len(result.ids) == result.counts.sum()
        multi_token = step.decode_slots[step.decode_tokens > 1]
        assert sorted(result.computed_slots.tolist()) == sorted(multi_token.tolist())
        most = dict(zip(step.decode_slots.tolist(), step.decode_tokens.tolist(), strict=True))
        ends = result.top_counts.cumsum()
        place = 0
        for slot, count in zip(result.slots.tolist(), result.counts.tolist(), strict=True):
            assert count <= most.get(slot, 1)
            yielded = self.yielded[slot]
            for token in range(place, place + count):
                yielded.ids.append(int(result.ids[token]))
                yielded.bits.append(int(result.logprobs.view(np.int32)[token]))
                span = slice(0, 0)
                if len(ends):
                    span = slice(ends[token] - result.top_counts[token], ends[token])
                bits = result.top_logprobs.view(np.int32)[span].tolist()
                yielded.tops.append(list(zip(result.top_ids[span].tolist(), bits, strict=True)))
            place += count
        counts = dict(zip(result.slots.tolist(), result.counts.tolist(), strict=True))
        columns = (result.computed_slots, result.computed_positions, result.drafted_tokens)
        for slot, computed, drafted in zip(*(c.tolist() for c in columns), strict=True):
            self.yielded[slot].computed.append(computed)
            self.drafted += drafted
            self.accepted += min(counts.get(slot, 1) - 1, drafted)


class PlannedProposer(Proposer):
    """A proposer with the sequences' future tokens; some of its draft tokens are wrong, at random."""

    def __init__(self, futures: Mapping[int, Sequence[int]], *, error_rate: float = 0.3) -> None:
        """`futures` are whole sequences by slot, prompts included."""
        self._futures = futures
        self._error_rate = error_rate
        self._random = np.random.default_rng(0)

    def propose(self, rows: StepRows) -> DraftTokens:
        drafts = []
        for slot, length, most in zip(
            rows.slots.tolist(), rows.num_tokens, rows.max_draft_tokens, strict=True
        ):
            ids = np.array(self._futures[slot][length : length + most], dtype=np.int64)
            wrong = self._random.random(len(ids)) < self._error_rate
            drafts.append(np.where(wrong, (ids + 1) % 10, ids))
        return DraftTokens.of(drafts, CPU)


def any_of(*allowed: Sequence[int] | None) -> Grammar:
    """Which ids each generated token may be, by its place; None, and places past the end: any."""
    return Grammar(GrammarKind.REGEX, json.dumps(allowed))


class FakeGrammars:
    """Grammars of `any_of`. A token that is not allowed ends the matcher."""

    def __init__(self, vocab_size: int) -> None:
        self._width = -(-vocab_size // 32)
        self._allowed: dict[int, list[list[int] | None]] = {}
        self._places: dict[int, int] = {}
        self.num_forced = 0

    def as_manager(self) -> GrammarManager:
        """This object with the type that a runner takes."""
        return cast("GrammarManager", self)

    def admit(
        self,
        slot: int,
        grammar: Grammar,
        generated: Ids,
        *,
        close_within: int = 0,
    ) -> None:
        self._allowed[slot] = json.loads(grammar.source)
        self._places[slot] = len(generated)

    def drop(self, slots: Ints) -> None:
        for slot in slots.tolist():
            del self._allowed[slot]

    def clear(self) -> None:
        self._allowed.clear()

    def start(self, rows: Sequence[MaskRequest]) -> MaskJob:
        return cast("MaskJob", _Job(lambda: self._masks(rows)))

    def _masks(self, rows: Sequence[MaskRequest]) -> Bitmasks:
        bits, forced, failed = [], [], []
        for row in rows:
            for token in row.new_tokens():
                if token not in (self._at(row.slot, 0) or [token]):
                    failed.append(row.slot)
                self._places[row.slot] += 1
            bits += [self._mask(self._at(row.slot, ahead)) for ahead in range(1 + len(row.drafts))]
            forced.append(self._jump(row))
        return Bitmasks(
            np.array(bits, dtype=np.int32),
            tuple(forced),
            dict.fromkeys(failed, "no place"),
            (None,) * len(rows),
        )

    def _jump(self, row: MaskRequest) -> tuple[int, ...]:
        forced: list[int] = []
        while (
            len(forced) < row.max_jump_forward_tokens
            and len(only := self._at(row.slot, 0) or []) == 1
        ):
            forced.append(only[0])
            self._places[row.slot] += 1
        self.num_forced += len(forced)
        return tuple(forced)

    def _at(self, slot: int, ahead: int) -> list[int] | None:
        place = self._places[slot] + ahead
        allowed = self._allowed[slot]
        return allowed[place] if place < len(allowed) else None

    def _mask(self, allowed: list[int] | None) -> list[int]:
        flags = np.full(self._width * 32, allowed is None)
        flags[allowed or []] = True
        return np.packbits(flags, bitorder="little").view(np.int32).tolist()


class _Job:
    def __init__(self, result: Callable[[], Bitmasks]) -> None:
        self.result = result


@dataclass(frozen=True)
class RankJob:
    """The work of every rank of a group: prompts, and the tokens to generate from one checkpoint."""

    folder: Path
    draft: Path | None
    prompts: list[list[int]]
    num_tokens: int


def speculate_on_a_rank(
    group: ProcessGroup, jobs: list[RankJob]
) -> tuple[list[tuple[dict[int, Yielded], int, int]], tuple[list[float], list[int]]]:
    """The tokens, drafts and accepted drafts of each job on this rank; then a scored prompt."""
    return [_speculate(group, job) for job in jobs], score_on_a_rank(group, jobs[0])


def score_on_a_rank(group: ProcessGroup, job: RankJob) -> tuple[list[float], list[int]]:
    """Log probabilities of the first prompt but of its first token, and one candidate each, computed in two chunks."""
    kernels = PlainKernels(deterministic=True)
    with torch.inference_mode():
        model = load_model(
            job.folder, dtype=torch.float32, kernels=kernels, group=group, device=CPU
        )
    stepper = Stepper(model, kernels, dtype=torch.float32)
    prompt = job.prompts[0]
    whole = stepper.admission(0, prompt, prefill_logprobs=True, prefill_top_n_tokens=1)
    results = [
        stepper.run(replace(whole, chunk_tokens=ints([7]))),
        stepper.run(Forward(chunk_slots=ints([0]), chunk_tokens=ints([len(prompt) - 7]))),
    ]
    logprobs = np.concatenate([result.prefill_logprobs for result in results])
    ids = np.concatenate([result.prefill_top_ids for result in results])
    return logprobs[1:].tolist(), ids[1:].tolist()


def _speculate(group: ProcessGroup, job: RankJob) -> tuple[dict[int, Yielded], int, int]:
    kernels = PlainKernels(deterministic=True)
    options = {
        "dtype": torch.float32,
        "kernels": kernels,
        "group": group,
        "device": CPU,
    }
    with torch.inference_mode():
        model = load_model(job.folder, **options)  # type: ignore[arg-type]
        loader = SpeculationLoader(folder=job.folder, **options)  # type: ignore[arg-type]
        model, speculation = loader.load(model, draft_folder=job.draft, max_draft_tokens=3)
    stepper = Stepper(model, kernels, dtype=torch.float32, speculation=speculation)
    wants = {slot: Want(prompt) for slot, prompt in enumerate(job.prompts)}
    run = Generation(stepper, wants, job.num_tokens, allow=lambda _: (4, 3), chunk=7)
    return run.yielded, run.drafted, run.accepted
