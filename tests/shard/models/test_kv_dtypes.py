"""Models over KV in int8 and fp8: bits that depend only on the tokens, and logits close to plain KV's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace_shard.commands.device_settings import choose_cache_dtype
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.models.description import ModelDescription
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.models.models import (
    Driver,
    Run,
    edit_json,
    prompt_of,
    read_driver,
    save_tiny,
)
from millrace_testing.shards.ranks import run_ranks

CPU = torch.device("cpu")
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
NUM_TOKENS = 4
PROMPT = prompt_of(140, seed=1)
KL_BOUNDS = {INT8: 2e-4, E4M3: 5e-3, E5M2: 3e-2}
"""Nats, the largest of any token: the weights are random and large, so logits are far apart."""
WIDE_HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def load(
    folder: Path,
    cache_dtype: torch.dtype | None,
    *,
    kernels: str = "plain",
    dtype: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
) -> Driver:
    own = make_kernels(kernels, deterministic=True)
    return read_driver(folder, own, dtype=dtype, cache_dtype=cache_dtype, group=group)


def logits_of(driver: Driver, prompts: list[list[int]], chunk: int | None = None) -> Tensor:
    return torch.stack(driver.generate(prompts, NUM_TOKENS, chunk=chunk)[0].logits)


@pytest.mark.parametrize("cache_dtype", [INT8, E4M3, E5M2])
@pytest.mark.parametrize(
    ("kernels", "dtype", "model"),
    [
        ("plain", torch.float32, "llama"),
        ("cpu", torch.float32, "llama"),
        ("cpu", torch.bfloat16, "mistral"),
        ("cpu", torch.bfloat16, "gemma2"),
        ("cpu", torch.bfloat16, "gpt2"),
    ],
)
def test_bits_depend_only_on_the_tokens(
    cache_dtype: torch.dtype, kernels: str, dtype: torch.dtype, model: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"mistral": {**WIDE_HEADS, "sliding_window": 50}}.get(model, {})
    save_tiny(tmp_path, model, **changes)

    def driver() -> Driver:
        return load(tmp_path, cache_dtype, kernels=kernels, dtype=dtype)

    first = driver()
    alone = logits_of(first, [PROMPT])
    others = [prompt_of(length, seed=length) for length in (3, 61, 33)]
    assert torch.equal(alone, logits_of(driver(), [PROMPT, *others]))
    assert torch.equal(alone, logits_of(driver(), [PROMPT], chunk=37))
    assert torch.equal(alone, logits_of(driver(), [PROMPT, *others], chunk=19))
    # All tokens but the last again as a prompt, as after a restart or a preemption.
    ids = [*PROMPT, *alone.argmax(-1).tolist()]
    assert torch.equal(alone[-1], logits_of(driver(), [ids[:-1]])[0])
    # The first 128 tokens are in the cache.
    hit = Run(list(PROMPT), blocks=first_blocks(first, 128), computed=128)
    first.step([(hit, len(PROMPT) - 128)])
    assert torch.equal(alone[0], hit.logits[0])


def first_blocks(driver: Driver, num_tokens: int) -> list[int]:
    """Blocks of a prompt that has just been computed, of which `num_tokens` are looked at."""
    run = Run(list(PROMPT))
    driver.step([(run, len(PROMPT))])
    return run.blocks[: num_tokens // driver.kernels.block_size]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt2"])
def test_logits_are_close_to_those_without_codes(model: str, kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, model)
    exact = logits_of(load(tmp_path, None, kernels=kernels), [PROMPT])[:1].log_softmax(-1)
    for cache_dtype, bound in KL_BOUNDS.items():
        coded = logits_of(load(tmp_path, cache_dtype, kernels=kernels), [PROMPT])[:1]
        kl = (exact.exp() * (exact - coded.log_softmax(-1))).sum(-1)
        assert 0 < kl.max() < bound


def generate_on_a_rank(group: ProcessGroup, folder: Path) -> list[Tensor]:
    group.add_in_rank_order()
    return [
        logits_of(load(folder, cache_dtype, group=group), [PROMPT])
        for cache_dtype in (INT8, E4M3, E5M2)
    ]


def test_ranks_agree_with_each_other_and_with_a_single_rank(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    first, second = run_ranks(tmp_path, 2, generate_on_a_rank, tmp_path / "model")
    for cache_dtype, ours, theirs in zip((INT8, E4M3, E5M2), first, second, strict=True):
        assert torch.equal(ours, theirs)
        single = logits_of(load(tmp_path / "model", cache_dtype), [PROMPT])
        # A sum that differs in its last bit may lead to another code.
        torch.testing.assert_close(ours, single, atol=5e-3, rtol=0)


def test_bytes_of_a_token_follow_the_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", head_dim=32)
    driver = load(tmp_path, None)
    values = sum(2 * layer.num_kv_heads * 32 for layer in driver.model.geometry.layers)
    scales = sum(2 * layer.num_kv_heads * 4 for layer in driver.model.geometry.layers)
    for cache_dtype, expected in ((None, 4 * values), (E4M3, values), (INT8, values + scales)):
        loaded = LoadedModel(
            model=driver.model,
            kernels=driver.kernels,
            group=ProcessGroup.single(),
            device=CPU,
            dtype=torch.float32,
            cache_dtype=cache_dtype,
        )
        assert loaded.cache_shape().bytes_per_token == expected
        cache = load(tmp_path, cache_dtype).cache
        held = sum(each.nbytes for layer in cache for each in layer.by_block)
        assert held == expected * cache[0].keys.shape[0] * driver.kernels.block_size


def with_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


NAMES = [
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]


@pytest.mark.parametrize("model", ["llama", "stablelm"])
@pytest.mark.parametrize(("key", "value"), NAMES)
def test_scales_of_the_checkpoint_are_used(
    model: str, key: str, value: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model)
    attention = "model.layers.1.self_attn"
    with_tensors(
        tmp_path,
        {
            f"{attention}.{key}": torch.tensor(0.25, dtype=torch.bfloat16),
            f"{attention}.{value}": torch.tensor([0.1]),
        },
    )
    driver = load(tmp_path, E4M3)
    plain, scaled = (layer.scales for layer in driver.cache)
    assert plain is not None
    assert scaled is not None
    assert [float(scale) for scale in plain] == [1.0, 1.0]
    assert [float(scale) for scale in scaled] == [0.25, float(torch.tensor(0.1))]


def test_one_scale_serves_keys_and_values(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with_tensors(tmp_path, {"model.layers.0.self_attn.kv_scale": torch.tensor(0.5)})
    assert load(tmp_path, E5M2).model.geometry.layers[0].scales == (0.5, 0.5)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"k_scale": torch.tensor(1.0)}, "has a scale for keys only"),
        ({"v_scale": torch.tensor(1.0)}, "has a scale for values only"),
        ({"kv_scale": torch.tensor(0.0)}, "is 0.0; a scale must be a positive finite number"),
        ({"kv_scale": torch.tensor(torch.nan)}, "is nan; a scale must be"),
        ({"kv_scale": torch.ones(2)}, r"has shape \[2\]; one scale per tensor is supported"),
    ],
)
def test_bad_scales_are_named(tensors: dict[str, Tensor], words: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with_tensors(
        tmp_path, {f"model.layers.0.self_attn.{name}": each for name, each in tensors.items()}
    )
    with pytest.raises(WeightsError, match=f"model.layers.0.self_attn.*{words}"):
        load(tmp_path, E4M3)


def test_the_scheme_of_the_checkpoint_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    assert ModelDescription.read(tmp_path).cache_dtype() is None
    scheme: dict[str, Any] = {
        "type": "float",
        "num_bits": 8,
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }

    def described(**changes: object) -> ModelDescription:
        quantization = {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": scheme | changes,
        }
        edit_json(tmp_path / "config.json", quantization_config=quantization)
        return ModelDescription.read(tmp_path)

    assert described().cache_dtype() == E4M3
    assert described(scale_dtype=None).cache_dtype() == E4M3
    for changes in ({"num_bits": 4}, {"type": "int"}, {"strategy": "attn_head"}, {"dynamic": True}):
        with pytest.raises(UnsupportedModel, match=r"kv_cache_scheme=.*--kv-cache-dtype"):
            described(**changes).cache_dtype()
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]


def test_the_flag_beats_the_scheme_and_the_scheme_the_model(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edit_json(
        tmp_path / "config.json",
        quantization_config={
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {"num_bits": 8},
        },
    )

    def chosen(*flags: str) -> torch.dtype:
        config = ShardConfig.from_args([str(tmp_path), *flags])
        return choose_cache_dtype(config, torch.bfloat16)

    assert chosen() == chosen("--kv-cache-dtype=auto") == E4M3
    assert chosen("--kv-cache-dtype=int8") == INT8
    edit_json(tmp_path / "config.json", quantization_config=None)
    assert chosen() == torch.bfloat16
