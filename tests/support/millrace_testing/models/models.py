"""Tiny random checkpoints, and a loop that runs a model by itself, without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import StateRows
from millrace_shard.models.interface import CausalModel
from millrace_shard.models.load import load_model


def poison(cache: LayerCache) -> None:
    """Make every key and value NaN: int8 by its scales."""
    for each in cache.by_block:
        if each.dtype == torch.int8:
            each.fill_(127)
        else:
            each.copy_(torch.full((), torch.nan).to(each.dtype))


CPU = torch.device("cpu")
VOCAB = 199
NUM_PAGES = 32

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

_HYBRID = _FAMILY | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_SMALL_EXPERTS = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}

_CONVS = ["conv", "full_attention", "conv", "conv", "full_attention"]
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}
_LATENT = _MIXTURE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "rope_parameters": _YARN,
}
"""Heads whose keys and values have other widths, and positions past the length before the scaling."""
_ROTATED = ("rope_parameters", "n_routed_experts")
_CHANNELS = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 24}

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
    "gemma4_text": _FAMILY
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 2048,
        "final_logit_softcapping": 8.0,
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
    "gemma": _FAMILY | {"head_dim": 16},
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
    "phi": _FAMILY,
    "phi3": _FAMILY,
    "qwen2_moe": _MIXTURE
    | {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": _MIXTURE | {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24},
    "qwen3_next": _HYBRID | {"num_experts": 8, "num_experts_per_tok": 2} | _SMALL_EXPERTS,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | {"num_experts": 8, "num_experts_per_tok": 2} | _SMALL_EXPERTS,
    "lfm2": _FAMILY | {"num_hidden_layers": 5, "layer_types": _CONVS},
    "lfm2_moe": _FAMILY
    | {
        "num_hidden_layers": 5,
        "layer_types": _CONVS,
        "num_dense_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "bamba": _FAMILY | _MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "granitemoehybrid": _FAMILY
    | _MAMBA
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "shared_intermediate_size": 40,
        "num_local_experts": 0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "falcon_h1": _FAMILY
    | _MAMBA
    | {
        "mamba_d_ssm": 128,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.4, 0.6, 0.8, 1.3, 0.7],
        "mlp_multipliers": [0.9, 0.6],
    },
    "nemotron_h": {name: _FAMILY[name] for name in _FAMILY if name != "num_hidden_layers"}
    | {
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "layers_block_type": [
            *("linear_attention", "moe", "linear_attention", "full_attention"),
            *("mlp", "mlp"),
        ],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "n_routed_experts": 8,
        "n_group": 2,
        "routed_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 40,
        # transformers takes it for a limit of step sizes, in prompts only; the limits have a field of their own.
        "time_step_min": 1e-9,
    },
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
    "deepseek_v2": _LATENT
    | {"q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "kimi_linear": {name: value for name, value in _LATENT.items() if name not in _ROTATED}
    | {
        "num_hidden_layers": 4,
        "layer_types": [
            "full_attention" if layer == 2 else "linear_attention" for layer in range(4)
        ],
        "num_local_experts": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "glm4_moe_lite": _LATENT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "minimax_m2": _MIXTURE
    | {
        "head_dim": 16,
        "num_local_experts": 8,
        "intermediate_size": 24,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "granitemoe": _MIXTURE
    | {
        "num_local_experts": 8,
        "intermediate_size": 24,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "hunyuan_v1_moe": _FAMILY
    | {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_experts": 8,
        "moe_topk": 2,
        "intermediate_size": 24,
    },
    "ernie4_5_moe": _FAMILY
    | {
        "num_hidden_layers": 3,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 24,
    },
    "llama4_text": _MIXTURE
    | {
        "num_hidden_layers": 5,
        "head_dim": 16,
        "intermediate_size": 24,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 8,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 64,
        "floor_scale": 16,
        "attn_scale": 0.4,
    },
    "mamba": _CHANNELS,
    "falcon_mamba": _CHANNELS,
    "mamba2": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 24,
    },
    "gptj": {
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "rotary_dim": 8,
    },
    "falcon": _FAMILY | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "dbrx": {
        "vocab_size": VOCAB,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.6, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "phimoe": _MIXTURE
    | {
        "num_local_experts": 8,
        "intermediate_size": 24,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
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
    "nemotron": _FAMILY,
    "olmo": _FAMILY,
    "persimmon": _FAMILY,
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
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def read_model(
    folder: Path,
    kernels: Kernels | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> CausalModel:
    """`load_model` with what most tests ask for: plain deterministic kernels, and one rank."""
    return load_model(
        folder,
        dtype=dtype,
        kernels=kernels or PlainKernels(deterministic=True),
        group=group or ProcessGroup.single(),
        device=device,
        **options,
    )


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
    page: int = 0
    """Its page of states."""


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
            layer.new_cache(kernels, num_blocks, cache_dtype or dtype, device)
            for layer in model.geometry.layers
        ]
        self.states = tuple(layer.new(NUM_PAGES, dtype, device) for layer in model.geometry.states)
        self.num_pages = 0
        self._kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        """Convolution and state of a page at a position, by layer."""
        self._at: dict[int, int] = {}
        """The position of each page's state."""
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
        for run, _ in rows:
            if not run.page and self.states:
                self.num_pages += 1
                run.page = self.num_pages
            self._rewind(run)
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
            states=self._state_rows(rows),
        )

    def _rewind(self, run: Run) -> None:
        """Give `run`, which may start over or repeat its last step, the state at its position."""
        for index, layer in enumerate(self.states):
            key = run.page, run.computed, index
            if not run.computed:
                layer.zero(run.page)
            elif key in self._kept and self._at.get(run.page) != run.computed:
                conv, state = self._kept[key]
                layer.conv[run.page], layer.state[run.page] = conv, state
            self._kept[key] = layer.conv[run.page].clone(), layer.state[run.page].clone()

    def _state_rows(self, rows: Sequence[tuple[Run, int]]) -> StateRows | None:
        if not self.states:
            return None
        device, pages = self.device, [run.page for run, _ in rows]
        self._at |= {run.page: run.computed + count for run, count in rows}
        saved = torch.empty(0, dtype=torch.int64, device=device)
        pages_ = torch.tensor(pages, device=device)
        return StateRows(layers=self.states, pages=pages_, saved=saved)


def read_driver(
    folder: Path,
    kernels: Kernels | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> Driver:
    """A driver of the model in `folder`; `options` are those of `read_model`."""
    kernels = kernels or PlainKernels(deterministic=True)
    model = read_model(folder, kernels, dtype=dtype, device=device, **options)
    return Driver(model, kernels, dtype=dtype, device=device, cache_dtype=cache_dtype)


def assert_generates_as(
    reference: PreTrainedModel, prompts: Sequence[Sequence[int]], runs: Sequence[Run]
) -> None:
    """Each run has the tokens of transformers' own `generate`, and log probabilities within 1e-4 of its own."""
    for prompt, run in zip(prompts, runs, strict=True):
        tokens, expected = greedy(reference, prompt, len(run.logits))
        assert run.ids[len(prompt) :] == tokens
        torch.testing.assert_close(logprobs(run).cpu(), expected, atol=1e-4, rtol=0)


def assert_scores_as(
    reference: nn.Module, prompts: Sequence[Sequence[int]], runs: Sequence[Run]
) -> None:
    """Log probabilities at generated tokens are within 1e-4 of one pass of `reference` over each whole sequence."""
    for prompt, run in zip(prompts, runs, strict=True):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([run.ids[:-1]])).logits[0]
        expected = logits[len(prompt) - 1 :].float().log_softmax(-1)
        torch.testing.assert_close(logprobs(run), expected, atol=1e-4, rtol=0)


def logprobs(run: Run) -> Tensor:
    """Log probabilities at each generated token, [num_tokens, vocab]."""
    return torch.stack(run.logits).log_softmax(-1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids, none special."""
    return torch.randint(
        3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
