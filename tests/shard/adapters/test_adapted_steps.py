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
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.speculation.loading import Speculation
from millrace_testing.engines.steps import Stepper, beside, ints
from millrace_testing.models.adapters import (
    AdaptedJob,
    AdaptedModel,
    generate_on_a_rank,
    load_adapted,
    make_adapter,
    write_canonical,
)
from millrace_testing.models.models import logprobs, prompt_of, read_model, save_tiny
from millrace_testing.shards.ranks import run_ranks

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


def test_drafts_of_the_base_do_not_change_the_tokens_of_an_adapter(
    bench: Bench, tmp_path: Path
) -> None:
    draft = read_model(tmp_path / "model", bench.kernels)
    drafting = bench.stepper(speculation=Speculation(max_draft_tokens=3, draft=draft))
    alone = bench.stepper()
    for slot in (0, 1, 2):
        expected = [
            int(alone.run(alone.admission(slot, PROMPT[: 9 + slot], adapter_slot=slot)).ids[0])
        ]
        expected += [int(alone.decode([slot]).ids[0]) for _ in range(8)]
        result = drafting.run(
            drafting.admission(slot, PROMPT[: 9 + slot], adapter_slot=slot)
        ).ids.tolist()
        while len(result) < 9:
            step = Forward(
                decode_slots=ints([slot]), decode_tokens=ints([4]), draft_tokens=ints([3])
            )
            result += drafting.run(step).ids.tolist()
        assert result[:9] == expected


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


PROMPTS = [prompt_of(length, seed=length) for length in (6, 33, 12)]
SLOTS = [1, 0, 2]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "two-kv-heads": ("llama", {}, ALL),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}, ALL),
    "biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        ALL,
    ),
    "fused-projections": ("phi3", {}, FUSED),
    "fused-one-kv-head": ("phi3", {"num_key_value_heads": 1}, FUSED),
    "fused-gates": ("glm4", {}, [*ALL[:4], *FUSED[2:]]),
    "a-class-of-transformers": ("starcoder2", {}, [*ALL[:4], "c_fc", "c_proj", "lm_head"]),
}


def test_adapters_on_two_ranks_match_peft(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    cache, jobs, oracles = tmp_path / "cache", [], []
    for name, (model_type, overrides, targets) in CHECKPOINTS.items():
        base = save_tiny(tmp_path / name, model_type, **overrides)
        # A bias of a row-parallel projection is added once.
        adapters = [
            make_adapter(base, seed=1, r=5, target_modules=targets, lora_bias=True),
            make_adapter(base, seed=2, r=20, target_modules=targets[2:]),
        ]
        digests = tuple(write_canonical(adapter, cache) for adapter in adapters)
        oracles.append([base, *adapters])
        jobs.append(
            AdaptedJob(tmp_path / name, cache, digests, PROMPTS, SLOTS, num_tokens=3, chunk=7)
        )
    by_rank = run_ranks(tmp_path, 2, generate_on_a_rank, jobs)
    for runs, models in zip(by_rank[0], oracles, strict=True):
        for run, slot, prompt in zip(runs, SLOTS, PROMPTS, strict=True):
            with torch.no_grad():
                logits = models[slot](input_ids=torch.tensor([run.ids[:-1]])).logits[0]
            expected = logits[len(prompt) - 1 :].log_softmax(-1)
            torch.testing.assert_close(logprobs(run), expected, atol=1e-4, rtol=0)
    assert [[run.ids for run in runs] for runs in by_rank[1]] == [
        [run.ids for run in runs] for runs in by_rank[0]
    ]
