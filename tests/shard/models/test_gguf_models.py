"""Models in GGUF files, against transformers' models with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_shard.weights.gguf.config import CLASSES
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.models.gguf_files import BLOCK_TYPES, TinyGguf, read_config
from millrace_testing.models.models import Driver, Run, logprobs, prompt_of
from millrace_testing.shards.ranks import run_ranks

PROMPTS = [prompt_of(length, seed=length) for length in (5, 40)]
NUM_TOKENS = 3
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"biases": True}),
    "wide-heads": ("llama", {"head_dim": 128}),
    "window": ("mistral", {"sliding_window": 9}),
    "theta": ("qwen2", {"rope_theta": 1000000.0, "rms_norm_eps": 1e-3}),
    "norms": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def generate(folder: Path, group: ProcessGroup) -> list[Run]:
    kernels = PlainKernels(deterministic=True)
    with torch.inference_mode():
        model = load_model(
            folder,
            dtype=torch.float32,
            kernels=kernels,
            group=group,
            device=torch.device("cpu"),
        )
        return Driver(model, kernels, dtype=torch.float32).generate(PROMPTS, NUM_TOKENS, chunk=16)


def generate_on_a_rank(group: ProcessGroup, folders: list[Path]) -> list[list[Run]]:
    torch.set_num_threads(1)
    return [generate(folder, group) for folder in folders]


def assert_same_as_transformers(tiny: TinyGguf, runs: list[Run]) -> None:
    for run, prompt in zip(runs, PROMPTS, strict=True):
        with torch.no_grad():
            logits = tiny.model(input_ids=torch.tensor([run.ids[:-1]])).logits[0]
        expected = logits[len(prompt) - 1 :].log_softmax(-1)
        torch.testing.assert_close(logprobs(run), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("family", CLASSES)
def test_logits_match_transformers(family: str, kind: str, tmp_path: Path) -> None:
    tiny = TinyGguf(family, kind)
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    assert_same_as_transformers(tiny, generate(folder, ProcessGroup.single()))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_family_match_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[name]
    tiny = TinyGguf(family, "Q8_0", seed=1, **overrides)
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    assert read_config(folder)["model_type"] == family
    assert_same_as_transformers(tiny, generate(folder, ProcessGroup.single()))


def test_ranks_share_the_blocks_of_a_row(tmp_path: Path) -> None:
    # Four ranks hold 64 of the 256 inputs of o_proj each: a quarter of a block of Q6_K.
    jobs = {
        2: {"llama": "Q4_1", "mistral": "F16"},
        4: {"qwen2": "Q6_K", "qwen3": "Q4_K"},
    }
    for world_size, kinds in jobs.items():
        files = [TinyGguf(family, kind, seed=2) for family, kind in kinds.items()]
        folders = [
            prepare_gguf(
                tiny.write(tmp_path / f"{family}.gguf"), tmp_path / "cache", tokenizer=None
            )
            for family, tiny in zip(kinds, files, strict=True)
        ]
        for runs in run_ranks(tmp_path, world_size, generate_on_a_rank, folders):
            for tiny, run in zip(files, runs, strict=True):
                assert_same_as_transformers(tiny, run)
