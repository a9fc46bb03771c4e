"""Named campaigns: options that differ from a campaign of all kinds of faults; and small random models."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.faults.chaos.campaign import Kind
from bench.harness.paths import DEMO

Options = Mapping[str, Any]

STREAMS: Options = {"adapters": False, "long": 1, "requests": 1, "max_concurrent": 256}
SCENES: Mapping[str, Options] = {
    "all": {},
    # Long streams, and a shard that is killed, crashes or hangs: how long is the pause, and what is it made of?
    "kills": {
        **STREAMS,
        "kinds": (Kind.KILL,),
        "faults": 10,
        "pace": 5.0,
        "clients": 200,
        "pool": 60,
        "longest": 600,
        "kv_tokens": 262_144,
    },
    "hangs": {
        **STREAMS,
        "kinds": (Kind.HANG,),
        "faults": 4,
        "pace": 5.0,
        "clients": 50,
        "pool": 50,
        "longest": 300,
        "kv_tokens": 65_536,
    },
    # Routers that are replaced under a hundred streams and new requests: no request fails, and how long is the pause?
    "hand-overs": {
        **STREAMS,
        "kinds": (Kind.HAND_OVER,),
        "faults": 10,
        "pace": 3.0,
        "clients": 100,
        "pool": 60,
        "longest": 600,
        "kv_tokens": 262_144,
    },
    # A request among fifty that breaks each of its steps, in the way of `--poison`.
    "poison": {
        **STREAMS,
        "kinds": (Kind.POISON,),
        "faults": 4,
        "clients": 50,
        "pool": 50,
        "longest": 200,
        "kv_tokens": 65_536,
    },
    # Clients that hold connections, headers and bodies: the router's memory stays bounded.
    "crowd": {
        **STREAMS,
        "kinds": (Kind.CROWD, Kind.OVERSIZED, Kind.VANISH),
        "faults": 9,
        "pace": 2.0,
        "clients": 20,
        "pool": 40,
        "longest": 100,
        "kv_tokens": 65_536,
    },
    # Ten times as many clients as the server accepts, for three minutes.
    "overload": {
        **STREAMS,
        "faults": 0,
        "clients": 160,
        "max_concurrent": 16,
        "least_seconds": 180.0,
        "pool": 48,
        "longest": 120,
        "kv_tokens": 8192,
    },
    # A saturating load for an hour with a kill every few minutes.
    "soak": {
        **STREAMS,
        "kinds": (Kind.KILL,),
        "faults": 24,
        "pace": 300.0,
        "clients": 64,
        "pool": 96,
        "longest": 200,
        "kv_tokens": 65_536,
        "least_seconds": 3600.0,
    },
}
"""Options by the name of the scene."""
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "max_position_embeddings": 1024,
    "sliding_window": 48,
}
SMALL_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma3": {"model_type": "gemma3_text", **SMALL},
        "gpt_oss": {
            "model_type": "gpt_oss",
            **SMALL,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "qwen3_next": {
            "model_type": "qwen3_next",
            **SMALL,
            **SMALL_EXPERTS,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 8,
            "shared_expert_intermediate_size": 64,
        },
        "deepseek_v2": {
            "model_type": "deepseek_v2",
            **SMALL,
            **SMALL_EXPERTS,
            "num_key_value_heads": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    }
)
"""Fields of the configs of small random models: windows, experts, recurrent layers, latents."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def save_random(folder: Path, name: str) -> Path:
    """Write a random bfloat16 model of `MODELS` with the demo model's tokenizer; returns its folder."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    torch.manual_seed(0)
    fields = dict(MODELS[name])
    config = AutoConfig.for_model(
        fields.pop("model_type"),
        **fields,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in TOKENIZER_FILES:
        shutil.copy(DEMO / file, folder / file)
    return folder
