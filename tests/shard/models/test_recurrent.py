"""Layers that keep a state in place of keys and values: against transformers, and the same bits in any schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace_shard.commands.composition import check_files
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.split import check_split
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.models.models import (
    Driver,
    Run,
    assert_generates_as,
    edit_json,
    prompt_of,
    read_driver,
    save_tiny,
)
from millrace_testing.shards.ranks import run_ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "lfm2": {"conv_bias": True},
    "lfm2_moe": {},
    "bamba": {"mamba_proj_bias": True},
    "granitemoehybrid": {"mamba_n_groups": 1},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_n_groups": 1},
    "nemotron_h": {},
    "nemotron_h with latents": {"moe_latent_size": 32},
    "mamba2": {},
    "mamba": {},
    "falcon_mamba": {},
    "kimi_linear": {},
}
"""Those whose ranks share groups, or have the only one together."""
DTYPES = ("float32", "bfloat16")
LONG = prompt_of(197, seed=3)
"""Beyond three blocks."""
CELL = 64


def save(folder: Path, family: str) -> PreTrainedModel:
    """A tiny checkpoint with the settings of FAMILIES."""
    return save_tiny(folder, family.partition(" ")[0], **FAMILIES[family])


def spread_decays(model: PreTrainedModel, folder: Path) -> None:
    """Let states of heads decay by between 0.9999 and 0.1 a token, and save the checkpoint again."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                rates = torch.logspace(-4, 0.36, parameter.numel())
                parameter.copy_((rates / 0.6931).log().view_as(parameter))
            elif name.endswith("dt_bias"):
                parameter.zero_()
    model.save_pretrained(folder)


def driver_of(folder: Path, kernels: str = "cpu", dtype: str = "bfloat16") -> Driver:
    kind = getattr(torch, dtype)
    return read_driver(folder, make_kernels(kernels, deterministic=True), dtype=kind)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_long_contexts_of_slow_and_fast_decays_match_transformers(
    family: str, kernels: str, tmp_path: Path
) -> None:
    reference = save(tmp_path, family)
    spread_decays(reference, tmp_path)
    for chunk in (None, 50):
        runs = driver_of(tmp_path, kernels, "float32").generate([LONG], 6, chunk=chunk)
        assert_generates_as(reference, [LONG], runs)


def logits_of(driver: Driver, cuts: list[int]) -> Tensor:
    """Logits after the long prompt in chunks up to these positions, and of three decodes."""
    run, positions = Run(list(LONG)), [0, *cuts, len(LONG)]
    for start, end in itertools.pairwise(positions):
        driver.step([(run, end - start)])
    for _ in range(3):
        driver.step([(run, 1)])
    return torch.stack(run.logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_5_text", "falcon_h1"),
        *(
            pytest.param(family, marks=pytest.mark.long)
            for family in ("lfm2", "granitemoehybrid", "nemotron_h", "kimi_linear")
        ),
    ],
)
def test_a_cut_at_any_offset_of_a_block_changes_no_bit(
    family: str, dtype: str, tmp_path: Path
) -> None:
    save(tmp_path, family)
    driver = driver_of(tmp_path, dtype=dtype)
    whole = logits_of(driver, [])
    for offset in range(CELL):
        driver = Driver(driver.model, driver.kernels, dtype=getattr(torch, dtype))
        assert torch.equal(logits_of(driver, [CELL + offset]), whole)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_no_bit(family: str, kernels: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    dtype = "float32" if kernels == "plain" else "bfloat16"
    others = [prompt_of(length, seed=length) for length in (3, 61, 130)]
    alone = driver_of(tmp_path, kernels, dtype).generate([LONG[:90]], 5)[0]
    beside = driver_of(tmp_path, kernels, dtype).generate([LONG[:90], *others], 5, chunk=19)[0]
    assert torch.equal(torch.stack(alone.logits), torch.stack(beside.logits))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe", "bamba"])
@pytest.mark.parametrize("positions", [(64,), (1, 64, 66, 130), (128, 129)])
def test_a_copy_of_a_state_goes_on_with_the_same_bits(
    positions: tuple[int, ...], family: str, kernels: str, tmp_path: Path
) -> None:
    save(tmp_path, family)
    driver = driver_of(tmp_path, kernels, "float32")
    run, other = Run(list(LONG)), Run(prompt_of(9))
    batch = driver.admit([(other, 9), (run, 130)])
    states, pages = batch.states, [20 + place for place in range(len(positions))]
    assert states is not None
    saved = torch.full((9 + 130,), -1)
    saved[[9 + position - 1 for position in positions]] = torch.tensor(pages)
    driver.model.forward(replace(batch, states=replace(states, saved=saved)), driver.cache)
    run.computed = 130
    driver.step([(run, 67)])
    for position, page in zip(positions, pages, strict=True):
        again = Run(list(LONG), blocks=list(run.blocks), computed=position, page=page)
        driver.step([(again, len(LONG) - position)])
        assert torch.equal(again.logits[0], run.logits[0])


def test_a_page_belongs_to_one_sequence_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_5_text", num_hidden_layers=4)
    driver = driver_of(tmp_path)
    for layer in driver.states:
        layer.state.fill_(torch.nan)
        layer.conv.fill_(torch.nan)
    assert all(row.isfinite().all() for row in driver.generate([LONG[:70]], 2)[0].logits)
    used = [bool(layer.state[2:].isnan().all()) for layer in driver.states]
    assert all(used)


def generate_on_a_rank(group: ProcessGroup, folder: Path) -> list[Run]:
    group.add_in_rank_order()
    kernels = make_kernels("cpu", deterministic=True)
    return read_driver(folder, kernels, group=group).generate([LONG, LONG[:30]], 4, chunk=90)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_match_transformers(family: str, tmp_path: Path) -> None:
    reference = save(tmp_path / "model", family)
    first, second = run_ranks(tmp_path, 2, generate_on_a_rank, tmp_path / "model")
    assert_generates_as(reference, [LONG, LONG[:30]], first)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_5_text", r"2 recurrent key heads .* work: 1, 2$"),
        ("bamba", r"8 Mamba heads in 2 groups .* work: 1, 2$"),
    ],
)
def test_ranks_that_cannot_share_heads_are_refused(
    family: str, reason: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    check_split(spec, 2)
    with pytest.raises(UnsupportedModel, match=reason):
        check_split(spec, 4)


SUPER = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "vocab_size": 131_072,
    "hybrid_override_pattern": "ME" * 40 + "*" * 8,
    "num_key_value_heads": 2,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "routed_scaling_factor": 5.0,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}


def test_the_published_sizes_of_nemotron_3_super_are_those_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", **SUPER)
    assert ModelDescription.read(tmp_path).num_parameters() == pytest.approx(120e9, rel=0.01)


NO_MEANING: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_5_text", {"linear_num_value_heads": 3}, "linear_num_key_heads=2 does not divide"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "no layer with full_attention"),
    ("qwen3_5_text", {"layer_types": ["mamba"] * 4}, "must name one of linear_attention, full_"),
    ("qwen3_5_text", {"linear_key_head_dim": 0}, "linear_key_head_dim=0 must be"),
    ("llama", {"layer_types": ["linear_attention"] * 2}, "is not for llama"),
    ("lfm2", {"layer_types": ["conv"] * 5}, "no layer with full_attention"),
    ("bamba", {"attn_layer_indices": []}, "names no layer with attention"),
    ("bamba", {"mamba_d_head": 8}, "do not divide the 128 channels"),
    ("bamba", {"time_step_limit": [0.0]}, "must be two numbers"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "no layer with attention"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    ("falcon_h1", {"mamba_d_ssm": 96}, "do not divide mamba_d_ssm=96"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers=.* must be 5 numbers"),
    ("falcon_h1", {"key_multiplier": "1"}, "key_multiplier='1' must be a number"),
    ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "must be of M, .*, moe, one each layer"),
    ("nemotron_h", {"layers_block_type": ["mlp"]}, "names no layer with attention"),
    ("nemotron_h", {"num_hidden_layers": 9}, "num_hidden_layers=9, and layers_block_type is of 6"),
    ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size=0 must be"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron_h", {"n_groups": 3}, "n_groups=3 does not divide"),
    ("mamba", {"time_step_rank": "small"}, "time_step_rank='small' must be"),
    ("mamba", {"intermediate_size": 64}, "intermediate_size=64 is not supported"),
    ("kimi_linear", {"linear_attn_config": 4}, "linear_attn_config=4 must be an object"),
    ("kimi_linear", {"layer_types": ["linear_attention"] * 4}, "no layer with full_attention"),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [0], "full_attn_layers": [4]}},
        "must name each of 4 layers once, from 1 on",
    ),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), NO_MEANING)
def test_configs_without_meaning_are_refused(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        ModelDescription.read(tmp_path)


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    save_tiny(model, "llama")
    save_tiny(draft, "qwen3_next")
    config = ShardConfig(
        model_folder=model, draft_model=str(draft), uds_path="none", max_total_tokens=None
    )
    with pytest.raises(UnsupportedModel, match="type qwen3_next, which has recurrent layers"):
        check_files(config)
