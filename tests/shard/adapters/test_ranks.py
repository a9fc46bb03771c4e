"""Adapters split over two ranks, against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from millrace_testing.models.adapted_ranks import AdaptedJob, generate_on_a_rank
from millrace_testing.models.adapters import make_adapter, write_canonical
from millrace_testing.models.models import logprobs, prompt_of, save_tiny
from millrace_testing.shards.rank_processes import run_ranks

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


def test_two_ranks_compute_what_peft_computes(tmp_path: Path) -> None:
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
