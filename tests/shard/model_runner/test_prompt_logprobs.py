"""Scores of prompts equal transformers', for all chunks and batches, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millrace_shard.arrays import Floats, Ints
from millrace_shard.batch.step import BatchChange, Forward, StepResult
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.model_runner import launched_step
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.engines.steps import Stepper, after_prompt, ints
from millrace_testing.models.models import VOCAB, prompt_of, read_model, save_tiny

CPU = torch.device("cpu")
CUTS = [[80], [1, 79], [33, 33, 14], [7] * 11 + [3]]
CANDIDATES = 4


class Scored:
    """The columns of one slot, over all steps."""

    def __init__(self, results: Iterable[StepResult], slot: int) -> None:
        logprobs: list[float] = []
        ids: list[float] = []
        candidates: list[float] = []
        for result in results:
            place = result.prefill_slots.tolist().index(slot)
            logprobs += _part(result.prefill_logprobs, result.prefill_counts, place)
            if len(result.prefill_top_counts):
                counts = result.prefill_counts * result.prefill_top_counts
                ids += _part(result.prefill_top_ids, counts, place)
                candidates += _part(result.prefill_top_logprobs, counts, place)
        self.logprobs = torch.tensor(logprobs)
        width = len(ids) // len(logprobs)
        self.ids = torch.tensor(ids, dtype=torch.int64).view(-1, width)
        self.candidates = torch.tensor(candidates).view(-1, width)


def _part(column: Ints | Floats, counts: Ints, place: int) -> list[float]:
    stop = int(counts[: place + 1].sum())
    return [float(value) for value in column[stop - int(counts[place]) : stop]]


def stepper(
    folder: Path, *, kernels: str = "plain", dtype: torch.dtype = torch.float32
) -> tuple[Stepper, Tensor]:
    """A runner over a random llama, and what transformers makes of the prompt in float32: [length, vocab]."""
    torch.set_num_threads(1)
    reference = save_tiny(folder, "llama")
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    made = make_kernels(kernels, deterministic=True)
    model = read_model(folder, made, dtype=dtype)
    return Stepper(model, made, dtype=dtype), expected


PROMPT = prompt_of(80, seed=5)


def score(
    runner: Stepper, cuts: list[int], *, others: bool = False, candidates: int = CANDIDATES
) -> Scored:
    """The prompt in slot 3, in chunks of these lengths; another prompt may be in every step, too."""
    first = runner.admission(3, PROMPT, prefill_logprobs=True, prefill_top_n_tokens=candidates)
    first = replace(first, chunk_tokens=ints(cuts[:1]))
    steps = [first, *(Forward(chunk_slots=ints([3]), chunk_tokens=ints([n])) for n in cuts[1:])]
    if others:
        steps = [_beside(step, runner, number) for number, step in enumerate(steps)]
    return Scored([runner.run(step) for step in steps], 3)


def _beside(step: Forward, runner: Stepper, number: int) -> Forward:
    """`step` after another prompt, of other wishes, that comes with it and leaves with the next."""
    other = runner.admission(
        5, prompt_of(9, seed=number), prefill_logprobs=True, prefill_top_n_tokens=number % 3 * 4
    )
    return after_prompt(step, other, dropped=[5] if number else [])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 0.1)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"{len(cuts)}-chunks")
def test_scores_match_transformers(
    cuts: list[int], kernels: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    runner, expected = stepper(tmp_path, kernels=kernels, dtype=dtype)
    result = score(runner, cuts)
    assert result.logprobs[0].isnan()
    assert result.ids[0].tolist() == [0] * CANDIDATES
    assert result.candidates[0].isnan().all()
    chosen = expected[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(result.logprobs[1:], chosen, atol=tolerance, rtol=0)
    best = expected[:-1].topk(CANDIDATES)
    torch.testing.assert_close(result.candidates[1:], best.values, atol=tolerance, rtol=0)
    yielded = expected[:-1].gather(1, result.ids[1:])
    torch.testing.assert_close(yielded, result.candidates[1:], atol=tolerance, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_bits_depend_neither_on_chunks_nor_on_the_batch_nor_on_slices(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = []
    for cuts, others, at_once in [
        (CUTS[0], False, 1 << 24),
        (CUTS[2], False, 1 << 24),
        (CUTS[3], True, 1 << 24),
        (CUTS[0], False, 1),
        (CUTS[2], True, 11 * VOCAB),
    ]:
        monkeypatch.setattr(launched_step, "SLICE_ELEMENTS", at_once)
        runner, _ = stepper(tmp_path, kernels=kernels)
        result.append(score(runner, cuts, others=others))
    for other in result[1:]:
        assert torch.equal(other.logprobs[1:], result[0].logprobs[1:])
        assert torch.equal(other.ids, result[0].ids)
        assert torch.equal(other.candidates[1:], result[0].candidates[1:])


def test_no_more_logits_exist_than_a_slice_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = stepper(tmp_path)
    model = runner.runner._model
    sizes: list[int] = []
    logits = model.logits

    def counted(states: Tensor, adapters: AdapterRows | None) -> Tensor:
        sizes.append(len(states))
        return logits(states, adapters)

    monkeypatch.setattr(launched_step, "SLICE_ELEMENTS", 16 * VOCAB + VOCAB // 2)
    monkeypatch.setattr(model, "logits", counted)
    score(runner, [50, 30])
    # Of each chunk: the position that samples or is checked, then slices of the prompt.
    assert sizes == [1, 16, 16, 16, 2, 1, 16, 14]


def test_a_slot_remembers_nothing_of_the_prompt_before(tmp_path: Path) -> None:
    runner, _ = stepper(tmp_path)
    score(runner, [80], candidates=2)
    runner.run(Forward(change=BatchChange(dropped_slots=ints([3]))))
    result = score(runner, [80], candidates=6)
    assert result.logprobs[0].isnan()
    assert result.candidates[0].isnan().all()
    assert result.ids.shape == (80, 6)


def test_the_token_after_a_scored_prompt_is_the_one_after_any(tmp_path: Path) -> None:
    runner, _ = stepper(tmp_path)
    plain = runner.run(runner.admission(0, PROMPT, top_n_tokens=3))
    scored = runner.run(
        runner.admission(1, PROMPT, top_n_tokens=3, prefill_logprobs=True, prefill_top_n_tokens=2)
    )
    assert scored.ids.tolist() == plain.ids.tolist()
    assert scored.logprobs.tolist() == plain.logprobs.tolist()
    assert scored.top_ids.tolist() == plain.top_ids.tolist()
