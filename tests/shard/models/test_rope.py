"""The table against transformers' own rotary modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, StableLmConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.interface import KVLayer
from millrace_shard.models.rope import (
    RopeTables,
    longest_position,
    model_rope_table,
    rope_table,
)
from millrace_shard.models.rope_spec import RopeSpec
from millrace_shard.models.transformers_backend.rotary import rope_of

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
    "rope_theta": 1e4,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
STATIC: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 777.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.8, "beta_fast": 20.0, "beta_slow": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    },
}


def config(rope: dict[str, Any], **overrides: Any) -> LlamaConfig:
    settings = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    return LlamaConfig(**settings, rope_parameters=dict(rope), **overrides)


def rope(settings: dict[str, Any], **overrides: Any) -> RopeSpec:
    result = rope_of(config(settings, **overrides))
    assert result is not None
    return result


def reference(module: torch.nn.Module, positions: Tensor) -> Tensor:
    """The table of a rotary module of transformers: halves once, cosines first."""
    cos, sin = module(torch.zeros(1), positions.unsqueeze(0))
    half = cos.shape[-1] // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", STATIC)
def test_rope_kinds_that_do_not_depend_on_a_length_match_transformers(name: str) -> None:
    table = rope_table(rope(STATIC[name]), 300)
    assert table.shape == (300, 8)
    assert table.dtype == torch.float32
    expected = reference(LlamaRotaryEmbedding(config(STATIC[name])), torch.arange(300))
    torch.testing.assert_close(table, expected, atol=1e-6, rtol=0)


def test_the_table_follows_an_explicit_head_dim() -> None:
    wide = config(STATIC["default"], head_dim=20)
    expected = reference(LlamaRotaryEmbedding(wide), torch.arange(9))
    torch.testing.assert_close(rope_table(rope(STATIC["default"], head_dim=20), 9), expected)


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_partial_rotary_rotates_a_share_of_the_channels(kind: str) -> None:
    partial = StableLmConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters=STATIC[kind] | {"partial_rotary_factor": 0.5},
    )
    spec = rope_of(partial)
    assert spec is not None
    table = rope_table(spec, 40)
    assert table.shape == (40, 8)
    torch.testing.assert_close(table, reference(StableLmRotaryEmbedding(partial), torch.arange(40)))


def test_dynamic_rotates_each_position_as_the_last_of_its_sequence() -> None:
    table = rope_table(rope(DYNAMIC), 200)
    for length in (1, 60, 128, 129, 150, 200):
        module = LlamaRotaryEmbedding(config(DYNAMIC))
        expected = reference(module, torch.arange(length))
        torch.testing.assert_close(table[length - 1], expected[-1], atol=1e-5, rtol=0)
    within = reference(LlamaRotaryEmbedding(config(DYNAMIC)), torch.arange(128))
    torch.testing.assert_close(table[:128], within, atol=1e-6, rtol=0)


def test_longrope_changes_factors_by_position_or_is_long_throughout() -> None:
    short = reference(LlamaRotaryEmbedding(config(LONGROPE)), torch.arange(32))
    long = reference(LlamaRotaryEmbedding(config(LONGROPE)), torch.arange(128))
    assert not torch.allclose(short, long[:32])
    by_position = rope_table(rope(LONGROPE), 128)
    torch.testing.assert_close(by_position, torch.cat((short, long[32:])), atol=1e-6, rtol=0)
    throughout = rope_table(rope(LONGROPE), 128, long_context=True)
    torch.testing.assert_close(throughout, long, atol=1e-6, rtol=0)


def test_the_longest_sequence_expected_chooses_the_factors_and_the_size() -> None:
    longrope = rope(LONGROPE)
    assert torch.equal(model_rope_table(longrope, None), rope_table(longrope, 128))
    assert torch.equal(model_rope_table(longrope, 32), rope_table(longrope, 32))
    expected = rope_table(longrope, 33, long_context=True)
    assert torch.equal(model_rope_table(longrope, 33), expected)
    assert model_rope_table(longrope, 1000).shape == (128, 8)


@pytest.mark.parametrize(
    ("max_total_tokens", "layers", "expected"),
    [
        # Each position takes 2 * 3 * 16 bytes at least, in the layers that keep all positions.
        (None, [KVLayer(3, 16), KVLayer(3, 16, window=40)], 90),
        (None, [KVLayer(3, 16, latent_dim=8)], 128),
        (None, [KVLayer(3, 16, window=40)], 128),
        (None, [KVLayer(300, 160)], 2),
        (100, [KVLayer(3, 16)], 100),
    ],
)
def test_tables_end_with_the_positions_that_a_gpu_has_memory_for(
    monkeypatch: pytest.MonkeyPatch,
    max_total_tokens: int | None,
    layers: list[KVLayer],
    expected: int,
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 90 * 96 + 50))
    tables = RopeTables(max_total_tokens, torch.device("cuda"))
    tables.limit(layers)
    tables.device = torch.device("cpu")
    table = tables.table(rope(STATIC["default"]))
    assert torch.equal(table, rope_table(rope(STATIC["default"]), expected))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (STATIC["default"], 128),
        (STATIC["linear"], 512),
        (DYNAMIC, 256),
        (YARN, 128),
        (YARN | {"factor": 8.0}, 256),
        (LONGROPE, 128),
        (STATIC["llama3"], 128),
    ],
)
def test_the_longest_position_follows_the_scaling(settings: dict[str, Any], expected: int) -> None:
    assert longest_position(rope(settings)) == expected


def test_many_positions_are_the_same_as_few() -> None:
    linear = rope(STATIC["linear"])
    assert torch.equal(rope_table(linear, 20_000)[:100], rope_table(linear, 100))


def test_other_kinds_are_refused_by_name() -> None:
    odd = config(STATIC["default"])
    odd.rope_parameters = {"rope_type": "proportional", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match="rope_type 'proportional' is not supported"):
        rope_of(odd)
    odd.rope_parameters = {"full_attention": dict(STATIC["default"])}
    with pytest.raises(UnsupportedModel, match="all layers must have one kind"):
        rope_of(odd)
    odd.rope_parameters = STATIC["linear"] | {"strange": 1}
    with pytest.raises(UnsupportedModel, match="strange"):
        rope_of(odd)
