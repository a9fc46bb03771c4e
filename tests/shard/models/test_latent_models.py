"""Attention over latents (MLA): what its cache takes, its bits at every cut, published configs, and refusals."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace_shard.commands.chosen_kernels import chosen_kernels
from millrace_shard.commands.device_settings import choose_cache_dtype
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels import choose
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import (
    CONFIGS,
    CPU,
    Driver,
    Run,
    assert_generates_as,
    assert_scores_as,
    edit_json,
    prompt_of,
    read_driver,
    read_model,
    save_tiny,
)
from millrace_testing.quantized.checkpoints import save_quantized

LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
LENGTH = 70
"""Beyond a page of the CPU kernels."""
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
V2_LITE = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
KIMI_K2 = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "vocab_size": 163840,
}


FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def experts_of(spec: DecoderSpec) -> ExpertsSpec:
    experts = spec.layers[-1].feed_forward
    assert isinstance(experts, ExpertsSpec)
    return experts


def test_the_published_config_of_v2_lite_is_read() -> None:
    spec = FAMILIES["deepseek_v2"].read(V2_LITE)
    attention = spec.layers[0].attention
    assert (attention.head_dim, attention.latent_dim, attention.num_kv_heads) == (576, 512, 1)
    stretch = 0.1 * 0.707 * math.log(40) + 1
    assert attention.scale == pytest.approx(192**-0.5 * stretch**2)
    assert attention.rope is not None
    assert getattr(attention.rope.scaling, "attention_factor", None) == 1.0
    assert attention.rope.interleaved
    assert experts_of(spec).router.rule == RoutingRule(top_k=6, scoring=Scoring.SOFTMAX)
    assert [isinstance(each.feed_forward, ExpertsSpec) for each in spec.layers[:2]] == [False, True]


def test_the_published_config_of_kimi_k2_is_read_as_one_of_deepseek_v3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", **KIMI_K2)
    model = ModelDescription.read(tmp_path)
    assert model.model_type == "kimi_k2"
    assert model.spec is not None
    rule = experts_of(model.spec).router.rule
    assert (rule.scoring, rule.top_k, rule.renormalise) == (Scoring.SIGMOID, 8, True)
    assert (rule.num_groups, rule.scale) == (1, 2.827)
    # A trillion parameters.
    assert model.num_parameters() == pytest.approx(1.026e12, rel=0.01)


@pytest.mark.parametrize(
    ("value", "renormalises"), [(True, True), (False, False), (None, False), (..., True)]
)
def test_kimi_linears_scores_are_renormalised_as_in_its_class(
    value: object, renormalises: bool, tmp_path: Path
) -> None:
    fields = {name: each for name, each in KIMI_LINEAR.items() if name != "moe_renormalize"}
    fields |= {} if value is ... else {"moe_renormalize": value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    assert experts_of(spec).router.rule.renormalise == renormalises


def test_the_published_config_of_kimi_linear_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", **KIMI_LINEAR)
    model = ModelDescription.read(tmp_path)
    assert model.spec is not None
    full = [layer + 1 for layer, each in enumerate(model.spec.layers) if each.attends]
    assert full == FULL
    attention = model.spec.layers[3].attention
    assert attention.rope is None
    assert attention.scale == pytest.approx(192**-0.5)
    rule = experts_of(model.spec).router.rule
    assert (rule.scoring, rule.top_k, rule.scale) == (Scoring.SIGMOID, 8, 2.446)
    assert model.num_parameters() == pytest.approx(49.1e9, rel=0.01)
    assert model.info().max_position_embeddings == 1 << 20


@pytest.mark.parametrize("model_type", LATENTS)
def test_a_token_takes_the_bytes_of_its_latent(model_type: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, model_type)
    kernels = make_kernels("plain", deterministic=True)
    group = ProcessGroup.single()
    model = read_model(tmp_path, kernels, dtype=torch.bfloat16)
    loaded = LoadedModel(
        model=model, kernels=kernels, group=group, device=CPU, dtype=torch.bfloat16
    )
    assert loaded.cache_shape().bytes_per_token == 3 * (32 + 16) * 2
    cache = Driver(model, kernels, dtype=torch.bfloat16).cache
    assert all(len(each.by_block) == 1 for each in cache)
    assert all(each.by_block[0].shape[1:] == (16, 1, 48) for each in cache)


def cut_at(driver: Driver, ids: list[int], cut: int) -> torch.Tensor:
    run = Run(list(ids))
    driver.step([(run, cut)])
    driver.step([(run, len(ids) - cut)])
    driver.step([(run, 1)])
    return torch.stack(run.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bits_are_equal_whatever_token_a_prompt_is_cut_at(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "deepseek_v3", kv_lora_rank=64, qk_rope_head_dim=32)
    kernels = make_kernels("cpu", deterministic=True)
    model = read_model(tmp_path, kernels, dtype=dtype)
    ids = prompt_of(LENGTH, seed=2)
    drivers = (Driver(model, kernels, dtype=dtype, num_blocks=5) for _ in range(1, LENGTH))
    first, *others = (cut_at(driver, ids, cut) for cut, driver in enumerate(drivers, 1))
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_a_prefix_of_another_request_gives_the_same_bits(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v2")
    kernels = make_kernels("cpu", deterministic=True)
    ids = prompt_of(LENGTH, seed=2)
    driver = read_driver(tmp_path, kernels, dtype=torch.bfloat16)
    (whole,) = driver.generate([ids], 3)
    again = Run(list(ids), blocks=[whole.blocks[0]], computed=64)
    for count in (LENGTH - 64, 1, 1):
        driver.step([(again, count)])
    assert all(map(torch.equal, again.logits, whole.logits))


@pytest.mark.parametrize("model_type", LATENTS)
def test_fp8_blocks_that_span_heads_match_transformers(model_type: str, tmp_path: Path) -> None:
    prompts = [prompt_of(length, seed=length) for length in (5, 40)]
    sizes: dict[str, Any] = {"moe_intermediate_size": 64, "q_lora_rank": 24}
    reference = save_quantized(tmp_path, model_type, "fp8-block", **sizes)
    runs = read_driver(tmp_path).generate(prompts, 3, chunk=16)
    assert_scores_as(reference, prompts, runs)


def test_layers_that_predict_further_tokens_are_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = save_tiny(tmp_path, "deepseek_v3")
    path = tmp_path / "model.safetensors"
    more = {
        "eh_proj.weight": (64, 128),
        "enorm.weight": (64,),
        "self_attn.q_a_proj.weight": (24, 64),
    }
    tensors = {f"model.layers.3.{name}": torch.randn(shape) for name, shape in more.items()}
    save_file(load_file(path) | tensors, path, {"format": "pt"})
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
    caplog.set_level(logging.INFO)
    prompts = [prompt_of(20)]
    assert_generates_as(reference, prompts, read_driver(tmp_path).generate(prompts, 3))
    assert "layers from 3 on predict further tokens: --speculator mtp drafts by them" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("deepseek_v3", {"index_topk": 2048}, "index_topk=2048 is not supported for deepseek_v3"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v2", {"n_group": 3}, "n_group=3 of 8 experts"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types=['dense'] must name"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace=2"),
    ],
)
def test_fields_that_cannot_be_computed_are_refused(
    model_type: str, overrides: dict[str, Any], message: str
) -> None:
    raw = CONFIGS[model_type] | {"model_type": model_type} | overrides
    with pytest.raises(UnsupportedModel) as refusal:
        FAMILIES[model_type].read(raw)
    assert message in str(refusal.value)


def test_ranks_that_do_not_divide_the_heads_are_refused_with_those_that_do(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3")
    with pytest.raises(UnsupportedModel, match="3 shards cannot share 4 attention heads and 24"):
        ModelDescription.read(tmp_path).layer_shape(3)


def shard_config(folder: Path, **flags: Any) -> ShardConfig:
    return ShardConfig(model_folder=folder, uds_path=str(folder / "s"), **flags)


def test_codes_for_latents_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3")
    (tmp_path / "model.safetensors").unlink()
    config = shard_config(tmp_path, kv_cache_dtype="int8")
    with pytest.raises(UnsupportedModel, match=r"caches latents .* without --kv-cache-dtype int8"):
        chosen_kernels(config, CPU, torch.bfloat16, ProcessGroup.single())


def test_a_scheme_of_the_checkpoint_for_codes_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "deepseek_v3")
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    edit_json(tmp_path / "config.json", quantization_config=scheme)
    caplog.set_level(logging.INFO)
    kept = choose_cache_dtype(shard_config(tmp_path), torch.bfloat16)
    assert kept == torch.bfloat16
    assert "kv_cache_scheme in config.json is not followed" in caplog.text


def test_kernels_of_cuda_refuse_wider_latents_than_published_ones(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    save_tiny(tmp_path, "deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    shape = ModelDescription.read(tmp_path).layer_shape(1)
    choose._check_cuda_shapes([shape])
    wider = replace(shape, head_dim=640 + 64, latent_dim=640)
    with pytest.raises(choose._UnfitError, match=r"latents of 16 to 512 .* not 640 and 64"):
        choose._check_cuda_shapes([wider])
