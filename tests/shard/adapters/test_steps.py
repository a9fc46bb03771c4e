"""Adapters behind the runner: prompt log probabilities, cached prefixes, drafts, graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor

from millrace_shard.batch.step import Forward
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_shard.speculation.loading import Speculation
from millrace_testing.engines.steps import Stepper, beside, ints
from millrace_testing.models.adapters import (
    AdaptedModel,
    load_adapted,
    make_adapter,
    write_canonical,
)
from millrace_testing.models.models import prompt_of, save_tiny

PROMPT = prompt_of(40, seed=1)
BLOCK = 16


class Bench:
    """A tiny model with two adapters, and PEFT's own models of them."""

    def __init__(self, root: Path, model_type: str = "llama") -> None:
        torch.set_num_threads(1)
        self.base = save_tiny(root / "model", model_type)
        targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
        self.adapters = [
            make_adapter(self.base, seed=seed, r=6, target_modules=targets) for seed in (1, 2)
        ]
        digests = [write_canonical(adapter, root / "cache") for adapter in self.adapters]
        self.kernels = PlainKernels(deterministic=True)
        self.adapted: AdaptedModel = load_adapted(
            root / "model", root / "cache", self.kernels, digests=digests
        )

    def stepper(self, **options: Any) -> Stepper:
        """An empty batch over the adapted model."""
        return Stepper(
            self.adapted.driver.model,
            self.kernels,
            dtype=torch.float32,
            adapters=self.adapted.store.table,
            **options,
        )

    def scores(self, adapter_slot: int, ids: list[int]) -> Tensor:
        """PEFT's log probabilities after each of `ids`, [n, vocab]."""
        model: PeftModel = [self.base, *self.adapters][adapter_slot]
        with torch.no_grad():
            logits: Tensor = model(input_ids=torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_prompt_logprobs_match_the_adapter(bench: Bench) -> None:
    stepper = bench.stepper()
    fields: dict[str, Any] = {"prefill_logprobs": True, "prefill_top_n_tokens": 2}
    first = stepper.admission(0, PROMPT, adapter_slot=1, **fields)
    parts = [
        replace(first, chunk_tokens=ints([11])),
        Forward(chunk_slots=ints([0]), chunk_tokens=ints([29])),
    ]
    other = stepper.admission(1, PROMPT[:9], adapter_slot=2, **fields)
    results = [stepper.run(part) for part in parts] + [stepper.run(other)]
    for found, slot, ids in ((results[:2], 1, PROMPT), (results[2:], 2, PROMPT[:9])):
        scores = np.concatenate([result.prefill_logprobs for result in found])[1:]
        expected = bench.scores(slot, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(scores), expected, atol=1e-4, rtol=0)


def test_a_cached_prefix_continues_with_its_adapter(bench: Bench) -> None:
    stepper = bench.stepper()
    stepper.run(stepper.admission(0, PROMPT, adapter_slot=1))
    step = stepper.admission(1, [*PROMPT[:-1], 5], adapter_slot=1)
    (sequence,) = step.change.admitted
    blocks = stepper.batch.blocks.rows(ints([0]), 2)[0]
    cached = replace(
        step,
        change=replace(
            step.change,
            admitted=(replace(sequence, cached_tokens=2 * BLOCK),),
            grown_blocks=np.concatenate([blocks, step.change.grown_blocks[2:]]),
        ),
        chunk_tokens=ints([len(PROMPT) - 2 * BLOCK]),
    )
    result = stepper.run(cached)
    expected = bench.scores(1, [*PROMPT[:-1], 5])[-1]
    assert result.ids.tolist() == [int(expected.argmax())]
    assert result.logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)


def test_drafts_of_the_base_do_not_change_what_an_adapter_generates(
    bench: Bench, tmp_path: Path
) -> None:
    draft = load_model(
        tmp_path / "model",
        dtype=torch.float32,
        kernels=bench.kernels,
        group=ProcessGroup.single(),
        device=torch.device("cpu"),
    )
    drafting = bench.stepper(speculation=Speculation(max_draft_tokens=3, draft=draft))
    alone = bench.stepper()
    for slot in (0, 1, 2):
        expected = [
            int(alone.run(alone.admission(slot, PROMPT[: 9 + slot], adapter_slot=slot)).ids[0])
        ]
        expected += [int(alone.decode([slot]).ids[0]) for _ in range(8)]
        found = drafting.run(
            drafting.admission(slot, PROMPT[: 9 + slot], adapter_slot=slot)
        ).ids.tolist()
        while len(found) < 9:
            step = Forward(
                decode_slots=ints([slot]), decode_tokens=ints([4]), draft_tokens=ints([3])
            )
            found += drafting.run(step).ids.tolist()
        assert found[:9] == expected


def test_a_step_of_the_base_sees_no_rows_of_adapters(bench: Bench) -> None:
    """A step after one with adapters, and steps between, use their own rows' adapters."""
    stepper = bench.stepper()
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def keep(step: Forward) -> None:
        result = stepper.run(step)
        for slot, id_ in zip(result.slots.tolist(), result.ids.tolist(), strict=True):
            tokens[slot].append(id_)

    keep(stepper.admission(0, PROMPT[:9]))
    keep(beside(stepper.admission(1, PROMPT[:9], adapter_slot=1), [0]))
    keep(Forward(decode_slots=ints([0])))
    keep(beside(stepper.admission(2, PROMPT[:9], adapter_slot=2), [1, 0]))
    for slots in ([2], [0], [1, 2], [2, 1], [0, 1, 2], [0, 1, 2]):
        keep(Forward(decode_slots=ints(slots)))
    for slot, ids in tokens.items():
        scores = bench.scores(slot, PROMPT[:9] + ids[:-1])[8:]
        assert ids == scores.argmax(-1).tolist()
