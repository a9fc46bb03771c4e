"""Tiny random checkpoints, and a loop that runs a model by itself, without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.interface import CausalModel


def poison(cache: LayerCache) -> None:
    """Make every key and value NaN: int8 by its scales."""
    for each in cache.by_block:
        if each.dtype == torch.int8:
            each.fill_(127)
        else:
            each.copy_(torch.full((), torch.nan).to(each.dtype))


CPU = torch.device("cpu")
VOCAB = 199

_FAMILY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_MIXTURE = _FAMILY | {"num_hidden_layers": 3, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _FAMILY,
    "mistral": _FAMILY | {"sliding_window": None},
    "qwen2": _FAMILY,
    "qwen3": _FAMILY | {"head_dim": 16},
    "ministral3": _FAMILY
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "seed_oss": _FAMILY | {"head_dim": 16},
    "ernie4_5": _FAMILY | {"head_dim": 16},
    "hunyuan_v1_dense": _FAMILY | {"head_dim": 16},
    "gemma3_text": _FAMILY
    | {
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo3": _FAMILY
    | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": _FAMILY
    | {
        "logit_scale": 0.5,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "exaone4": _FAMILY
    | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": _FAMILY | {"logit_scale": 0.5},
    "gemma2": _FAMILY | {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 12},
    "glm4": _FAMILY | {"head_dim": 16},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_bigcode": {
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
    },
    "gpt_neox": _FAMILY,
    "granite": _FAMILY
    | {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "mixtral": _MIXTURE | {"num_local_experts": 8},
    "olmo2": _FAMILY,
    "opt": _FAMILY | {"ffn_dim": 80, "word_embed_proj_dim": 64},
    "phi3": _FAMILY,
    "qwen2_moe": _MIXTURE
    | {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": _MIXTURE | {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24},
    "glm4_moe": _MIXTURE
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 24,
    },
    "gpt_oss": _MIXTURE
    | {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "num_local_experts": 8,
        "sliding_window": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
    "olmoe": _MIXTURE | {"num_experts": 8, "intermediate_size": 24},
    "smollm3": _FAMILY | {"no_rope_layer_interval": 2},
    "stablelm": _FAMILY | {"hidden_size": 64},
    "starcoder2": _FAMILY | {"sliding_window": 12},
}

_MIXTURE = {
    "moe_intermediate_size": 24,
    "moe_num_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
}
UNLISTED: dict[str, dict[str, Any]] = {
    "arcee": _FAMILY,
    "aria_text": _FAMILY | _MIXTURE,
    "camembert": _FAMILY | {"is_decoder": True},
    "diffllama": _FAMILY,
    "doge": _FAMILY | _MIXTURE,
    "flex_olmo": _FAMILY | _MIXTURE,
    "glm": _FAMILY | {"head_dim": 16},
    "granitemoe": _FAMILY | _MIXTURE,
    "nemotron": _FAMILY,
    "olmo": _FAMILY,
    "persimmon": _FAMILY,
    "phi": _FAMILY,
}
"""Classes that start with --allow-unlisted-model, or that it refuses."""


def save_tiny(
    folder: Path, model_type: str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> PreTrainedModel:
    """Write a random checkpoint of `model_type` to `folder`, and return the model itself: float32, eager attention.

    Weights are larger than at initialisation, and biases and norms are not trivial, so that logits are far apart and
    a parameter left out shows.
    """
    raw = (
        (CONFIGS | UNLISTED)[model_type]
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        | overrides
    )
    config = AutoConfig.for_model(model_type, **raw)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in content.items() if value is not None})
    )


def greedy(
    model: PreTrainedModel, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], Tensor]:
    """transformers' own `generate`: tokens, and their log probabilities [num_tokens, vocab]."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=VOCAB + 1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)
    return out.sequences[0, len(prompt) :].tolist(), logits.float().log_softmax(-1)


@dataclass
class Run:
    """One sequence being generated."""

    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    adapter: int = 0
    """Its adapter slot."""


class Driver:
    """Steps a model over a paged cache as an engine would, greedily; free pages hold NaN."""

    def __init__(
        self,
        model: CausalModel,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        num_blocks: int = 64,
        device: torch.device = CPU,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.kernels = kernels
        self.cache = [
            kernels.new_cache(
                num_blocks=num_blocks,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=cache_dtype or dtype,
                device=device,
                scales=layer.scales,
            )
            for layer in model.geometry.layers
        ]
        for each in self.cache:
            poison(each)
        self._clear([0])
        # Handed out from both ends, so that a sequence's blocks are not consecutive.
        free = list(range(1, num_blocks))
        self.free = [block for pair in zip(free, reversed(free), strict=True) for block in pair]
        self.free = list(dict.fromkeys(self.free))

    def step(self, rows: Sequence[tuple[Run, int]]) -> Tensor:
        """Compute the next `count` tokens of each run; logits of the last of each, [B, vocab]."""
        logits = self.model.forward(self.admit(rows), self.cache)
        for (run, count), row in zip(rows, logits, strict=True):
            run.computed += count
            if run.computed == len(run.ids):
                run.logits.append(row)
                run.ids.append(int(row.argmax()))
        return logits

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        chunk: int | None = None,
        adapters: Sequence[int] | None = None,
    ) -> list[Run]:
        """All prompts together, each computed `chunk` tokens at a time (default: at once), then decoded.

        `adapters` are their adapter slots.

        With chunks of different prompts ending at different steps, most steps mix prefill and decode.
        """
        slots = adapters or [0] * len(prompts)
        runs = [
            Run(list(prompt), adapter=slot) for prompt, slot in zip(prompts, slots, strict=True)
        ]
        while any(len(run.logits) < num_tokens for run in runs):
            live = [run for run in runs if len(run.logits) < num_tokens]
            rows = [(run, min(len(run.ids) - run.computed, chunk or len(run.ids))) for run in live]
            self.step(rows)
        return runs

    def _clear(self, blocks: list[int]) -> None:
        """Zero blocks before their first use, as an engine does."""
        for layer in self.cache:
            index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
            self.kernels.zero_blocks(layer, index)

    def admit(self, rows: Sequence[tuple[Run, int]]) -> RaggedBatch:
        """The batch that computes the next `count` tokens of each run, with blocks for them."""
        granted = []
        for run, count in rows:
            while len(run.blocks) * self.kernels.block_size < run.computed + count:
                run.blocks.append(self.free.pop(0))
                granted.append(run.blocks[-1])
        self._clear(granted)
        ids: list[int] = []
        positions: list[int] = []
        cache_rows: list[int] = []
        size = self.kernels.block_size
        for run, count in rows:
            span = range(run.computed, run.computed + count)
            ids += [run.ids[p] for p in span]
            positions += span
            cache_rows += [run.blocks[p // size] * size + p % size for p in span]
        counts = tuple(count for _, count in rows)
        contexts = tuple(run.computed + count for run, count in rows)
        starts = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        width = max(len(run.blocks) for run, _ in rows)
        tables = [run.blocks + [0] * (width - len(run.blocks)) for run, _ in rows]
        device = self.device
        return RaggedBatch(
            ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            cache_rows=torch.tensor(cache_rows, device=device),
            query_starts=starts.to(device),
            context_lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            logit_rows=(starts[1:].long() - 1).to(device),
            num_queries=counts,
            num_context=contexts,
            adapters=AdapterRows.of(
                np.repeat([run.adapter for run, _ in rows], counts),
                device,
                logit_rows=np.cumsum(counts) - 1,
            ),
        )


def logprobs(run: Run) -> Tensor:
    """Log probabilities at each generated token, [num_tokens, vocab]."""
    return torch.stack(run.logits).log_softmax(-1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids, none special."""
    return torch.randint(
        3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
