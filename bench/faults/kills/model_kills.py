"""Shards of several kinds of models are killed: mixtures of experts, windows, quantised weights and KV, two ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.faults.fixture import Fixture, Part, Report
from bench.faults.kills.kills import Scenario, run_scenario
from bench.harness.paths import DEMO

KILLS_EACH = 10
NUM_STREAMS = 40
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the flags it is served with."""

    name: str
    config: Mapping[str, Any] | None = None
    """Fields of the config of a small random model, with `model_type`; None: the demo model."""
    flags: tuple[str, ...] = ()
    num_ranks: int = 1
    longest: int = field(default=300)


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
CASES = (
    Case(name="gemma3", config={"model_type": "gemma3_text", **SMALL}),
    Case(
        name="gpt_oss",
        config={
            "model_type": "gpt_oss",
            **SMALL,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    Case(name="int4", flags=("--quantize=int4",)),
    Case(name="kv int8", flags=("--kv-cache-dtype=int8",)),
    Case(
        name="int4, kv int8, two ranks",
        flags=("--quantize=int4", "--kv-cache-dtype=int8"),
        num_ranks=2,
    ),
)


def save_random(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a random bfloat16 model of `config`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    torch.manual_seed(0)
    fields = dict(config)
    whole = AutoConfig.for_model(
        fields.pop("model_type"),
        **fields,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)


def kill_models(fixture: Fixture) -> Report:
    """KILLS_EACH kills of a shard of each case, under streams."""
    report = Report()
    for case in CASES:
        scenario = Scenario(
            name=case.name,
            num_streams=NUM_STREAMS,
            num_signals=KILLS_EACH,
            rank=case.num_ranks - 1,
            longest=case.longest,
            num_ranks=case.num_ranks,
            flags=case.flags,
        )
        with tempfile.TemporaryDirectory(prefix="millrace-model-") as folder:
            if case.config is not None:
                save_random(Path(folder), case.config)
            model = DEMO if case.config is None else Path(folder)
            run_scenario(replace(fixture, model=model), scenario, report)
    return report


PART = Part(name="models", title="Shards of several kinds of models killed", run=kill_models)
