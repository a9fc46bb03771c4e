"""Checkpoints that are refused, in one line that names method, field, tensor and file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.weights.quantized.quantization_config import SUPPORTED, read_quantization
from millrace_testing.models.models import CONFIGS, CPU, edit_json, read_model, save_tiny
from millrace_testing.quantized.checkpoints import save_mxfp4, save_quantized
from millrace_testing.quantized.linears import FORMATS

GPTQ = FORMATS["gptq"].config
PACKED = FORMATS["pack-quantized"].config
NF4 = FORMATS["nf4"].config


def packed(**weights: object) -> dict[str, Any]:
    group = PACKED["config_groups"]["group_0"]
    changed = {**group, "weights": {**group["weights"], **weights}}
    return {**PACKED, "config_groups": {"group_0": changed}}


SETTINGS: list[tuple[Any, str]] = [
    ({"quant_method": "exl2", "bits": 4}, rf"'exl2'.*{', '.join(SUPPORTED)}"),
    ({"quant_method": "hqq"}, "'hqq'"),
    ({"bits": 4}, "quant_method=None"),
    ({**GPTQ, "bits": 3}, "gptq: bits=3 is not supported; these are: 4, 8"),
    ({**GPTQ, "bits": True}, "gptq: bits=True"),
    ({**GPTQ, "group_size": 0}, "gptq: group_size=0"),
    ({**GPTQ, "group_size": 2**64}, "gptq: group_size=18446744073709551616"),
    ({**GPTQ, "group_size": 8}, "gptq: groups of 8 do not .* 64 inputs .* groups of 16 or more do"),
    ({**FORMATS["awq"].config, "group_size": 4}, "awq: groups of 4 do not fit"),
    (packed(group_size=8), "compressed-tensors: groups of 8 do not fit"),
    ({**FORMATS["fp8-block"].config, "weight_block_size": [8, 8]}, "fp8: groups of 8 do not fit"),
    ({**FORMATS["fp8-block"].config, "weight_block_size": [128, 2**64]}, "weight_block_size"),
    (FORMATS["mxfp4-pack-quantized"].config, "32 do not fit the 80 inputs .*; multiples of 32 do"),
    ([1], "quantization_config=.* must be an object"),
    ({**GPTQ, "desc_act": "yes"}, "gptq: desc_act='yes'"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'.*gptq, gptq_v2"),
    ({**GPTQ, "format": "gptq_p"}, "'gptq_p'"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format=True"),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype='int16'"),
    ({**GPTQ, "dynamic": {"(": {}}}, "dynamic has '\\('"),
    ({**GPTQ, "dynamic": {"a": {"bits": 2}}}, "bits=2"),
    ({**GPTQ, "dynamic": [1]}, "dynamic=\\[1\\]"),
    ({**FORMATS["awq"].config, "version": "gemv"}, "awq: version='gemv'.*these are: gemm"),
    ({**FORMATS["awq"].config, "version": "gemv_fast"}, "version='gemv_fast'"),
    ({**FORMATS["awq"].config, "version": "marlin"}, "version='marlin'"),
    ({**FORMATS["awq"].config, "bits": 8}, "awq: bits=8"),
    ({**FORMATS["auto-round-gptq"].config, "packing_format": "auto_round:x"}, "packing_format"),
    ({**PACKED, "format": "marlin-24"}, "format='marlin-24'.*pack-quantized"),
    ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({**PACKED, "config_groups": {}}, "config_groups"),
    ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config is not"),
    ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16"),
    ({**PACKED, "ignore": ["re:("]}, "regular expression"),
    (packed(num_bits=3), "num_bits=3 is not supported; these are: 4, 8"),
    (packed(strategy="block"), "strategy='block'"),
    (packed(strategy="group", group_size=None), "group_size"),
    (packed(actorder="other"), "actorder='other'"),
    ({**FORMATS["fp8-block"].config, "weight_block_size": [128]}, "weight_block_size"),
    ({**FORMATS["fp8-block"].config, "fmt": "e5m2"}, "fmt='e5m2'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo='W4A8'.*FP8, NVFP4"),
    ({**NF4, "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type='af4'"),
    ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
]


@pytest.mark.parametrize(("config", "message"), SETTINGS)
def test_settings_are_refused_by_name(
    config: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    without_weights(tmp_path, quantization_config=config)
    with pytest.raises(UnsupportedModel, match=message) as error:
        read_model(tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("flag", "name", "is_right"),
    [
        ("gptq", "gptq", True),
        ("marlin", "gptq", True),
        ("marlin", "awq", True),
        ("awq", "auto-round-awq", True),
        ("compressed-tensors", "float-quantized", True),
        ("fp8", "fp8-block", True),
        ("fp8", "fbgemm-fp8", True),
        ("bitsandbytes-nf4", "nf4", True),
        ("bitsandbytes", "llm-int8", True),
        ("awq", "gptq", False),
        ("int8", "gptq", False),
        ("int4", "awq", False),
        ("marlin", "nf4", False),
        ("bitsandbytes-fp4", "nf4", False),
        ("exl2", "gptq", False),
    ],
)
def test_a_flag_must_not_contradict(flag: str, name: str, is_right: bool, tmp_path: Path) -> None:
    without_weights(tmp_path, quantization_config=FORMATS[name].config)
    if is_right:
        assert read_quantization(tmp_path, flag)
        return
    with pytest.raises(UnsupportedModel, match=f"--quantize {flag}"):
        read_model(tmp_path, quantize=flag)


def test_empty_transforms_are_accepted(tmp_path: Path) -> None:
    for empty in (dict[str, object](), {"config_groups": dict[str, object]()}):
        without_weights(tmp_path, quantization_config={**PACKED, "transform_config": empty})
        assert read_quantization(tmp_path, None)


def test_a_flag_for_checkpoints_needs_one(tmp_path: Path) -> None:
    without_weights(tmp_path)
    for flag in ("awq", "gptq", "compressed-tensors", "marlin"):
        with pytest.raises(UnsupportedModel, match=f"--quantize {flag} needs a checkpoint"):
            read_model(tmp_path, quantize=flag)
    assert read_quantization(tmp_path, "int4") is None


@pytest.mark.parametrize(
    ("file", "raw", "method"),
    [
        ("config.json", {"compression_config": PACKED}, "compressed-tensors"),
        ("config.json", {"text_config": {"quantization_config": GPTQ}}, "gptq"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ],
)
def test_settings_in_other_files_are_read(
    file: str, raw: dict[str, Any], method: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(raw))
    result = read_quantization(tmp_path, None)
    assert result is not None
    assert result.method == method


def test_codes_without_settings_are_refused(tmp_path: Path) -> None:
    for name in ("fp8-block", "int-quantized"):
        save_quantized(tmp_path, "llama", name)
        edit_json(tmp_path / "config.json", quantization_config=None)
        with pytest.raises(WeightsError, match="does not hold floating-point numbers"):
            read_model(tmp_path)


def test_ranks_that_no_group_fits_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", "gptq-desc-act")
    with pytest.raises(UnsupportedModel, match=r"desc_act.*these numbers of shards work: 1$"):
        read_model(tmp_path, group=ProcessGroup(0, 2, CPU))


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "gpt2", "gptq")
    with pytest.raises(ModelError, match="quantization_config is not supported for gpt2"):
        read_model(tmp_path)


def without_weights(folder: Path, **fields: Any) -> None:
    """Write the config of a model whose weights must not be read."""
    config = {**CONFIGS["llama"], "model_type": "llama", **fields}
    (folder / "config.json").write_text(json.dumps(config))


FIRST_MODULE = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
OPTIONAL = ("g_idx", "weight_g_idx", "weight_shape")
"""Tensors that a weight can be read without. If inputs are scattered, another weight results, unnoticeably."""
STATE = "quant_state"
"""Part of the name of a JSON text, which may have any length."""
INDEX = ("g_idx", "weight_g_idx")


def refusal(folder: Path, kind: type[ModelError], *, ranks: int = 1) -> str:
    """The text with which rank 0 of `ranks` refuses to load."""
    group = ProcessGroup(0, ranks, CPU) if ranks > 1 else None
    with pytest.raises(kind) as error:
        read_model(folder, group=group, max_total_tokens=64)
    text = str(error.value)
    assert text.isprintable()
    return text


def without_numbers(value: float) -> Callable[[Tensor], Tensor]:
    """Another first element."""

    def change(found: Tensor) -> Tensor:
        changed = found.double().reshape(-1)
        changed = changed.index_fill(0, torch.tensor([0]), value)
        return changed.view(found.shape).to(found.dtype)

    return change


def damages(kind: str, found: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """What can be wrong with a tensor, and the text of the error."""
    if kind not in OPTIONAL:
        yield "is missing|has dtype uint8, not float16", None
    wrong = torch.int16 if found.dtype is torch.float64 else torch.float64
    yield "has dtype", found.to(torch.float32).to(wrong)
    if STATE in kind:
        yield "is not JSON", found[1:].clone()
        yield "has shape", found.unsqueeze(0)
        return
    yield "has shape", torch.stack((found, found))
    if kind in INDEX:
        for group in (-1, 4, 2**31 - 1):
            yield f"names group {group} of 4", without_numbers(group)(found)
        yield "has groups of other sizes", torch.zeros_like(found)
    elif found.is_floating_point() and kind not in ("weight",):
        if found.dtype is torch.float8_e4m3fn:
            yield "not finite", without_numbers(torch.nan)(found)
        else:
            for value in (torch.nan, torch.inf, -torch.inf):
                yield "not finite", without_numbers(value)(found)
    elif kind == "weight_scale":
        yield "exponent 255", torch.full_like(found, 255)
    elif kind == "weight_shape":
        yield r"is \[\d+, \d+\], not", found + 1


@pytest.mark.parametrize("name", FORMATS)
def test_every_damage_to_every_tensor_is_named(name: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", name, num_hidden_layers=1)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    kinds = [
        each.removeprefix(f"{FIRST_MODULE}.") for each in whole if each.startswith(FIRST_MODULE)
    ]
    assert len(kinds) > 1
    for kind in kinds:
        tensor = f"{FIRST_MODULE}.{kind}"
        for message, changed in damages(kind, whole[tensor]):
            rest = {each: result for each, result in whole.items() if each != tensor}
            save_file(rest if changed is None else {**rest, tensor: changed}, path)
            text = refusal(tmp_path, WeightsError)
            named = FIRST_MODULE if changed is None else tensor
            assert re.match(rf"tensor {re.escape(named)}.*({message})", text), (kind, message, text)
            assert changed is None or "model.safetensors" in text or kind == "weight", text


def test_a_file_cut_short_is_named_in_every_format(tmp_path: Path) -> None:
    for name in FORMATS:
        save_quantized(tmp_path, "llama", name, num_hidden_layers=1)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        text = refusal(tmp_path, WeightsError)
        assert re.search("model.safetensors is damaged or incomplete", text), text


WIDE = {
    **CONFIGS["llama"],
    "model_type": "llama",
    "head_dim": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 128,
}
"""16 ranks share the heads, and have 8 of 128 inputs each."""
UNGROUPED = ("channel", "tensor", "int-quantized", "naive", "fbgemm", "modelopt-fp8", "llm-int8")
"""Parts of the names of formats whose outputs have one scale each."""


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_that_cannot_share_groups_are_refused_before_weights_are_read(
    name: str, tmp_path: Path
) -> None:
    config = {**WIDE, "quantization_config": FORMATS[name].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if any(part in name for part in UNGROUPED) or name == "float-quantized":
        assert "no model.safetensors" in refusal(tmp_path, WeightsError, ranks=16)
        return
    text = refusal(tmp_path, UnsupportedModel, ranks=16)
    assert ": 16 shards cannot share " in text
    is_scattered = "actorder" in name or "desc-act" in name
    assert text.endswith(f"shards work: {'1' if is_scattered else '1, 2, 4, 8'}")


def test_ranks_cannot_share_groups_of_experts(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, num_attention_heads=8, num_key_value_heads=8)
    (tmp_path / "model.safetensors").write_bytes(b"")
    text = refusal(tmp_path, UnsupportedModel, ranks=8)
    assert "8 shards cannot share groups of 32 among 64 inputs" in text
    assert text.endswith("these numbers of shards work: 1, 2, 4")
    edit_json(tmp_path / "config.json", intermediate_size=72)
    assert "do not fit the 72 inputs" in refusal(tmp_path, UnsupportedModel)


def test_damaged_mxfp4_experts_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, num_hidden_layers=2)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for kind, message, change in (
        ("blocks", "has dtype int8, not uint8", lambda found: found.view(torch.int8)),
        ("blocks", "has shape", lambda found: found[:, :, :1].contiguous()),
        ("blocks", "is missing", lambda _: None),
        ("scales", "exponent 255", lambda found: found | 255),
        ("scales", "has shape", lambda found: found[1:].contiguous()),
        ("scales", "is missing", lambda _: None),
    ):
        name = f"{EXPERTS}_{kind}"
        changed = change(whole[name])
        rest = {each: found for each, found in whole.items() if each != name}
        save_file(rest if changed is None else {**rest, name: changed}, path)
        assert re.match(rf"tensor {EXPERTS}(_{kind})? .*{message}", refusal(tmp_path, WeightsError))


SLIDING = ["sliding_attention", "full_attention"]
CONFIG_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_hidden_layers": 2**40}, "num_hidden_layers=1099511627776 .*at most 4096"),
    ("llama", {"num_attention_heads": 10**9}, "num_attention_heads=.*at most 4096"),
    ("llama", {"max_position_embeddings": 10**30}, "max_position_embeddings=.*at most"),
    ("llama", {"vocab_size": 2**63}, "vocab_size=.*at most"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps=.*positive number"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act="),
    ("llama", {"layer_types": SLIDING}, "layer_types=.* is not for llama"),
    ("llama", {"rope_theta": float("nan")}, "rope_theta=nan"),
    ("llama", {"partial_rotary_factor": "half"}, "partial_rotary_factor='half'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "no factor, or it is 0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 1e8}}, "sequences of .* tokens"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers='x'"),
    ("qwen2", {"layer_types": SLIDING}, "sliding_window is off"),
    ("qwen3", {"layer_types": SLIDING[:1]}, "layer_types=.* for each of 2 layers"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "layer_types="),
    ("mistral", {"sliding_window": -1}, "sliding_window=-1"),
    ("gemma2", {"sliding_window": None}, "sliding_window=None"),
    ("gemma3_text", {"sliding_window": 0}, "sliding_window=0"),
    ("cohere2", {"layer_types": SLIDING * 2}, "layer_types=.* for each of 2 layers"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window=None"),
    ("gpt_oss", {"layer_types": SLIDING}, "layer_types=.* for each of 6 layers"),
    ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 of 8 experts"),
    ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok=2 of 1 experts"),
    ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers="),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
    ("glm4_moe", {"n_group": 3}, "n_group=3 of 8 experts"),
]


@pytest.mark.parametrize(("family", "fields", "message"), CONFIG_ERRORS)
def test_unsupported_configs_are_refused_before_weights_are_read(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {**CONFIGS[family], "model_type": family, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal(tmp_path, UnsupportedModel)
    assert re.search(message, text), text


EXPERT = "model.layers.0.mlp.experts"
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_hidden_layers": 1}, "tensor model.layers.1.* of layer 1, .* says 1 layers"),
    ("llama", {"num_hidden_layers": 4096}, "tensor model.layers.2.input_layernorm.* is missing"),
    (
        "llama",
        {"vocab_size": 1 << 22},
        r"embed_tokens.weight .*\[199, 64\], .*\[4194304, 64\]",
    ),
    ("llama", {"hidden_size": 2**20}, "embed_tokens.weight has shape"),
    ("llama", {"intermediate_size": 2**20}, "mlp.gate_proj.weight has shape"),
    ("llama", {"num_key_value_heads": 1}, "self_attn.k_proj.weight has shape"),
    ("llama", {"attention_bias": True}, "self_attn.q_proj.bias is missing"),
    ("mixtral", {"num_local_experts": 4}, "gate.weight has shape .8, 64., .*4, 64"),
    ("mixtral", {"num_local_experts": 2**20}, "gate.weight has shape"),
    (
        "qwen3_moe",
        {"num_experts": 9, "num_local_experts": None},
        "mlp.gate.weight has shape .8, 64., .*9, 64",
    ),
    ("qwen3_moe", {"moe_intermediate_size": 2**20}, f"{EXPERT}.0.gate_proj.weight has shape"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "model.layers.0.mlp.gate_proj.weight is missing"),
    ("glm4_moe", {"first_k_dense_replace": 0}, r"model.layers.0.mlp.gate\.\w+ is missing"),
    ("glm4_moe", {"n_shared_experts": 2}, "shared_experts.gate_proj.weight has shape"),
    ("gpt_oss", {"num_local_experts": 16}, "mlp.router.weight has shape"),
    ("gpt_oss", {"intermediate_size": 2**20}, "experts.gate_up_proj.* has shape"),
    ("qwen3", {"head_dim": 32}, "has shape"),
]


@pytest.mark.parametrize(("family", "fields", "message"), CONTRADICTIONS)
def test_tensors_that_contradict_the_config_are_named(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    read_model(tmp_path, max_total_tokens=64)
    edit_json(tmp_path / "config.json", **fields)
    text = refusal(tmp_path, WeightsError)
    assert re.search(message, text), text


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    save_tiny(tmp_path, "glm4_moe")
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "model.layers.4.eh_proj.weight": torch.zeros(64, 128)}, path)
    read_model(tmp_path, max_total_tokens=64)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0)
    assert "layer 4, its config says 4 layers" in refusal(tmp_path, WeightsError)


def test_towers_may_have_more_layers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    more = {
        "vision_tower.layers.7.weight": torch.zeros(2),
        "model.visual.layers.9.b": torch.ones(1),
    }
    save_file({**load_file(path), **more}, path)
    read_model(tmp_path, max_total_tokens=64)


NUM_MUTATIONS = 150
"""Of each kind."""


def test_mutated_checkpoints_are_refused_or_loaded() -> None:
    program = "millrace_testing.quantized.fuzz_checkpoints"
    done = subprocess.run(
        [sys.executable, "-m", program, str(NUM_MUTATIONS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    for kind in ("header", "config", "gguf"):
        assert f"'{kind} refused': " in done.stdout
        assert f"'{kind} loaded': " in done.stdout
