from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.families.registry import FAMILIES
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.models.models import (
    Driver,
    Run,
    edit_json,
    greedy,
    logprobs,
    prompt_of,
    read_driver,
    save_tiny,
)

CPU = torch.device("cpu")
NUM_TOKENS = 8


def load(
    folder: Path,
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    max_total_tokens: int | None = None,
    name: str = "plain",
) -> Driver:
    kernels = make_kernels(name, deterministic=deterministic, block_size=block_size)
    return read_driver(folder, kernels, dtype=dtype, max_total_tokens=max_total_tokens)


@lru_cache(maxsize=1)
def generated(
    reference: PreTrainedModel, lengths: tuple[int, ...]
) -> list[tuple[list[int], Tensor]]:
    """By transformers, for prompts of these lengths; a test asks for the same several times."""
    return [greedy(reference, prompt_of(length, seed=length), NUM_TOKENS) for length in lengths]


def assert_same_as_generate(
    reference: PreTrainedModel,
    driver: Driver,
    *,
    lengths: Sequence[int] = (5, 70, 18),
    chunk: int | None = None,
) -> None:
    prompts = [prompt_of(length, seed=length) for length in lengths]
    runs = driver.generate(prompts, NUM_TOKENS, chunk=chunk)
    wanted = generated(reference, tuple(lengths))
    for prompt, run, (tokens, expected) in zip(prompts, runs, wanted, strict=True):
        assert run.ids[len(prompt) :] == tokens
        # transformers computes gated delta nets in chunks of 64, which rounds otherwise.
        atol = 2e-4 if reference.config.model_type == "qwen3_next" else 1e-4
        torch.testing.assert_close(logprobs(run), expected, atol=atol, rtol=0)


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "rope_theta": 5000.0,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.3}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 9, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-off": ("qwen2", {"sliding_window": 9, "max_window_layers": 0}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-partial-rotary": (
        "phi3",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "granite": ("granite", {"logits_scaling": 3.0, "attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 9}),
    "gemma": ("gemma", {"attention_bias": True}),
    "gemma-published": ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "attention_bias": True}),
    "gemma2-without-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "cohere": ("cohere", {"attention_bias": True}),
    "cohere-head-norms": ("cohere", {"use_qk_norm": True}),
    "glm4": ("glm4", {"attention_bias": False}),
    "glm4-yarn": ("glm4", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "ministral3": ("ministral3", {}),
    "ministral3-window": ("ministral3", {"sliding_window": 9}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", {"attention_bias": True}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 50.0,
                "factor": 1.0,
            }
        },
    ),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "layer_types": None}),
    "gemma3-scaling": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "gemma4-plain": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": False,
            "attention_bias": True,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "layer_types": None, "attention_bias": True}),
    "olmo3-yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "layer_types": None, "attention_bias": True}),
    "exaone4": ("exaone4", {"num_hidden_layers": 5, "layer_types": None}),
    "exaone4-without-windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 9}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-normalised": ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2_moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-window": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-dense-layers": (
        "qwen3_next",
        {"mlp_only_layers": [0, 3], "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3_next-odd-heads": ("qwen3_next", {"linear_value_head_dim": 20}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5-equal-heads": (
        "qwen3_5_text",
        {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 48},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"num_hidden_layers": 4}),
    "lfm2": ("lfm2", {"conv_bias": True}),
    "lfm2-plain-width": (
        "lfm2",
        {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe-without-bias": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    "bamba": ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
    "bamba-one-group": ("bamba", {"mamba_n_groups": 1, "mamba_conv_bias": False}),
    "granite4": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "granite4-experts": (
        "granitemoehybrid",
        {"num_local_experts": 8, "intermediate_size": 24, "attention_bias": True},
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    "falcon_h1-norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_d_ssm": None}),
    "falcon_h1-gate-first": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1},
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-latent": ("nemotron_h", {"moe_latent_size": 32}),
    "nemotron_h-dense": (
        "nemotron_h",
        {
            "layers_block_type": None,
            "hybrid_override_pattern": "-M*M-",
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
        },
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-without-groups": (
        "glm4_moe",
        {
            "n_group": 1,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-greedy": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": 24, "attention_bias": True},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "deepseek_v3-direct": ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": None}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite-dense": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "sparse", "dense"], "attention_bias": True},
    ),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear-lists": (
        "kimi_linear",
        {
            "q_lora_rank": None,
            "layer_types": None,
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "head_dim": 32,
                "num_heads": 2,
                "short_conv_kernel_size": 3,
            },
        },
    ),
    "minimax_m2": ("minimax_m2", {}),
    "granitemoe": ("granitemoe", {"attention_bias": True}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"attention_bias": True}),
    "olmoe": ("olmoe", {}),
    "olmoe-normalised": (
        "olmoe",
        {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe-layers": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 5,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
        },
    ),
    "llama4": ("llama4_text", {}),
    "llama4-two-experts": (
        "llama4_text",
        {
            "use_qk_norm": False,
            "moe_layers": [0, 3],
            "no_rope_layers": [1, 1, 0, 0, 1],
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "mamba": ("mamba", {"use_bias": True, "time_step_rank": 5}),
    "falcon_mamba": ("falcon_mamba", {"use_conv_bias": False}),
    "mamba2": ("mamba2", {"use_bias": True}),
    "mamba2-one-group": ("mamba2", {"n_groups": 1, "use_conv_bias": False}),
    "gptj": ("gptj", {}),
    "gptj-wide": ("gptj", {"n_inner": 96, "rotary_dim": 16, "activation_function": "gelu"}),
    "falcon": ("falcon", {"bias": True}),
    "falcon-one-norm": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "falcon-7b": ("falcon", {"new_decoder_architecture": False}),
    "falcon-old-heads": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "bloom": ("bloom", {}),
    "bloom-six-heads": ("bloom", {"hidden_size": 48, "n_head": 6}),
    "mpt": ("mpt", {}),
    "mpt-six-heads": ("mpt", {"d_model": 48, "n_heads": 6, "attn_config": {"clip_qkv": 0.6}}),
    "dbrx": ("dbrx", {}),
    "dbrx-plain": (
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 9.0},
            "ffn_config": {
                "ffn_hidden_size": 32,
                "moe_num_experts": 8,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": None,
            },
        },
    ),
    "phimoe": ("phimoe", {}),
    "phimoe-window": (
        "phimoe",
        {"sliding_window": 9, "attention_bias": False, "lm_head_bias": False},
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-clamped": ("gpt_oss", {"swiglu_limit": 0.3, "swiglu_alpha": 2.5}),
    "rope-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "rope-yarn": ("llama", {"rope_parameters": YARN}),
    "rope-yarn-mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
    "rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 24,
                "rope_theta": 500.0,
            }
        },
    ),
}


def test_every_family_has_a_checkpoint() -> None:
    assert {model_type for model_type, _ in CHECKPOINTS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("plain", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_output_equals_generate(name: str, kernels: str, tmp_path: Path) -> None:
    model_type, overrides = CHECKPOINTS[name]
    reference = save_tiny(tmp_path, model_type, **overrides)
    assert_same_as_generate(reference, load(tmp_path, name=kernels))
    assert_same_as_generate(reference, load(tmp_path, name=kernels, deterministic=True), chunk=7)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_first_layers_are_a_model_of_fewer_layers(kernels: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama")
    whole = load(tmp_path, name=kernels)
    first = Driver(whole.model.first_layers(1), whole.kernels, dtype=torch.float32)
    assert_same_as_generate(reference, whole)
    assert len(whole.cache) == 2
    assert len(first.cache) == 1
    reference.model.layers = reference.model.layers[:1]
    reference.config.num_hidden_layers = 1
    generated.cache_clear()
    assert_same_as_generate(reference, first)


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_any_block_size_gives_the_same(block_size: int, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "mistral", sliding_window=9)
    driver = load(tmp_path, block_size=block_size)
    driver = Driver(driver.model, driver.kernels, dtype=torch.float32, num_blocks=130)
    assert_same_as_generate(reference, driver, chunk=11)


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "olmoe", "gpt_oss"]
)
def test_experts_that_are_stacked_in_the_file_match_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "by-expert", name)
    reference.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = load_file(tmp_path / "stacked" / "model.safetensors")
    assert stacked["model.layers.2.mlp.experts.gate_up_proj"].ndim == 3
    assert_same_as_generate(reference, load(tmp_path / "stacked"))


def as_baichuan(folder: Path, **changes: Any) -> None:
    """Rewrite a checkpoint of Llama as those of Baichuan are."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{prefix}.{name}_proj.weight") for name in "qkv"]
        tensors[f"{prefix}.W_pack.weight"] = torch.cat(parts)
    save_file(tensors, path)
    own = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    edit_json(folder / "config.json", **own, num_key_value_heads=None, **changes)


def test_baichuan_is_llama_with_a_fused_projection(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", num_key_value_heads=4)
    as_baichuan(tmp_path)
    assert_same_as_generate(reference, load(tmp_path))


def test_baichuan_2_has_a_head_of_normalised_rows(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "vocab_size": 125_696}
    reference = save_tiny(tmp_path, "llama", num_key_value_heads=4, **sizes)
    as_baichuan(tmp_path)
    reference.lm_head.weight.data = F.normalize(reference.lm_head.weight)
    assert_same_as_generate(reference, load(tmp_path), lengths=(5, 18))


def test_baichuan_13b_has_slopes_in_place_of_rotations(tmp_path: Path) -> None:
    """The oracle is Llama without rotations, whose mask has the biases."""
    reference = save_tiny(tmp_path, "llama", num_key_value_heads=4)
    as_baichuan(tmp_path, max_position_embeddings=None, model_max_length=256)
    rotary = reference.model.rotary_emb
    rotary.inv_freq.zero_()
    prompt = prompt_of(70)
    for chunk in (None, 7):
        (run,) = load(tmp_path).generate([prompt], NUM_TOKENS, chunk=chunk)
        length = len(run.ids) - 1
        distances = torch.arange(length) - torch.arange(length).unsqueeze(1)
        slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).view(1, 4, 1, 1)
        mask = (slopes * distances).masked_fill(distances > 0, -torch.inf)
        ids = torch.tensor([run.ids[:-1]])
        logits = reference(ids, attention_mask=mask).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(logprobs(run), logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_tensors_of_a_model_that_was_saved_without_its_head_are_found(tmp_path: Path) -> None:
    """As bigscience/bloom is published."""
    reference = save_tiny(tmp_path, "bloom")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name.removeprefix("transformer."): each for name, each in tensors.items()}, path)
    assert_same_as_generate(reference, load(tmp_path))


def test_masks_that_older_versions_saved_are_not_biases(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "gptj")
    path = tmp_path / "model.safetensors"
    masks = {
        f"transformer.h.{layer}.attn.{name}": torch.ones(1, 1, 8, 8)
        for layer in range(2)
        for name in ("bias", "masked_bias")
    }
    save_file(load_file(path) | masks, path)
    assert_same_as_generate(reference, load(tmp_path))


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_chunks_of_positions_begin_at_blocks_of_any_size(block_size: int, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama4_text", attention_chunk_size=32)
    driver = load(tmp_path, block_size=block_size, deterministic=True)
    driver = Driver(driver.model, driver.kernels, dtype=torch.float32, num_blocks=400)
    assert_same_as_generate(reference, driver, lengths=(5, 70, 31), chunk=11)
    prompt = prompt_of(70)
    whole, pieces = (driver.generate([prompt], 3, chunk=chunk)[0] for chunk in (None, 9))
    assert torch.equal(torch.stack(whole.logits), torch.stack(pieces.logits))


def test_chunks_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama4_text", attention_chunk_size=24)
    with pytest.raises(UnsupportedModel, match="attention_chunk_size=24 is not a multiple of 16"):
        load(tmp_path)


def test_sharded_files_match_transformers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_as_generate(reference, load(tmp_path))


def test_dynamic_rope_past_its_trained_length_matches_transformers(tmp_path: Path) -> None:
    """Prompts within the trained length, generations past it: there `generate` is consistent with itself."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    reference = save_tiny(tmp_path, "llama", max_position_embeddings=40, rope_parameters=scaling)
    for chunk in (None, 7):
        assert_same_as_generate(reference, load(tmp_path), lengths=(37, 5, 40), chunk=chunk)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 2.6, 2.9],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 9.0, 12.0, 14.0, 15.0],
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize(
    ("model_type", "own"), [("llama", {}), ("phimoe", {"short_mscale": 1.2, "long_mscale": 1.2})]
)
def test_longrope_within_its_original_length_matches_transformers(
    model_type: str, own: dict[str, Any], tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path, model_type, rope_parameters=LONGROPE | own)
    assert_same_as_generate(reference, load(tmp_path), lengths=(5, 24), chunk=7)


def test_longrope_that_grows_past_its_original_length_matches_transformers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", rope_parameters=LONGROPE)
    assert_same_as_generate(reference, load(tmp_path), lengths=(28, 32))


def test_longrope_for_expected_long_sequences_matches_transformers(
    tmp_path: Path,
) -> None:
    reference = save_tiny(tmp_path, "llama", rope_parameters=LONGROPE)
    driver = load(tmp_path, max_total_tokens=128)
    assert_same_as_generate(reference, driver, lengths=(33, 60), chunk=7)


def test_logits_belong_to_the_requested_rows(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3")
    prompt = prompt_of(20)
    expected = reference(torch.tensor([prompt])).logits[0]
    for rows in ([], [19], [3, 0, 19]):
        driver = load(tmp_path)
        batch = replace(
            driver.admit([(Run(prompt), 20)]), logit_rows=torch.tensor(rows, dtype=torch.int64)
        )
        logits = driver.model.forward(batch, driver.cache)
        assert logits.dtype == torch.float32
        assert logits.shape == (len(rows), 199)
        torch.testing.assert_close(logits, expected[rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
def test_deterministic_bits_depend_neither_on_the_batch_nor_on_chunks(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    window: dict[str, Any] = {"sliding_window": 50} if model_type == "mistral" else {}
    save_tiny(tmp_path, model_type, **window)
    prompt = prompt_of(140, seed=1)
    others = [prompt_of(length, seed=length) for length in (3, 61, 33)]

    def logits_of(prompts: list[list[int]], chunk: int | None = None) -> Tensor:
        driver = load(tmp_path, deterministic=True, dtype=dtype)
        return torch.stack(driver.generate(prompts, 4, chunk=chunk)[0].logits)

    alone = logits_of([prompt])
    assert torch.equal(alone, logits_of([prompt, *others]))
    assert torch.equal(alone, logits_of([prompt], chunk=1))
    assert torch.equal(alone, logits_of([prompt], chunk=37))
    assert torch.equal(alone, logits_of([prompt, *others], chunk=19))


def test_a_sequence_with_nan_harms_no_other(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    for deterministic in (False, True):
        driver = load(tmp_path, deterministic=deterministic)
        alone = load(tmp_path, deterministic=deterministic).generate([prompt_of(20)], 4)[0]
        sick, well = Run(prompt_of(20, seed=9)), Run(prompt_of(20))
        driver.step([(sick, 20), (well, 20)])
        for layer in driver.cache:
            layer.keys[sick.blocks] = torch.nan
            layer.values[sick.blocks] = torch.nan
        for _ in range(3):
            logits = driver.step([(sick, 1), (well, 1)])
            assert logits[0].isnan().all()
        assert well.ids == alone.ids
