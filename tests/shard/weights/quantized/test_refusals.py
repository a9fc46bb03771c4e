"""Checkpoints that are refused, in one line that names method, field, tensor and file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_shard.weights.quantized.quantization_config import SUPPORTED, read_quantization
from millrace_testing.models.models import CONFIGS as CONFIGS_OF_MODELS
from millrace_testing.models.models import edit_json
from millrace_testing.quantized.checkpoints import save_quantized
from millrace_testing.quantized.linears import FORMATS

GPTQ = FORMATS["gptq"].config
PACKED = FORMATS["pack-quantized"].config
NF4 = FORMATS["nf4"].config
MODULE = "model.layers.1.mlp.down_proj"


def packed(**weights: object) -> dict[str, Any]:
    group = PACKED["config_groups"]["group_0"]
    changed = {**group, "weights": {**group["weights"], **weights}}
    return {**PACKED, "config_groups": {"group_0": changed}}


CONFIGS: list[tuple[Any, str]] = [
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


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_settings_are_refused_by_name(
    config: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    without_weights(tmp_path, quantization_config=config)
    with pytest.raises(UnsupportedModel, match=message) as error:
        load(tmp_path)
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
        load(tmp_path, quantize=flag)


def test_empty_transforms_are_accepted(tmp_path: Path) -> None:
    for empty in (dict[str, object](), {"config_groups": dict[str, object]()}):
        without_weights(tmp_path, quantization_config={**PACKED, "transform_config": empty})
        assert read_quantization(tmp_path, None)


def test_a_flag_for_checkpoints_needs_one(tmp_path: Path) -> None:
    without_weights(tmp_path)
    for flag in ("awq", "gptq", "compressed-tensors", "marlin"):
        with pytest.raises(UnsupportedModel, match=f"--quantize {flag} needs a checkpoint"):
            load(tmp_path, quantize=flag)
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
def test_settings_are_found_in_other_files(
    file: str, raw: dict[str, Any], method: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(raw))
    found = read_quantization(tmp_path, None)
    assert found is not None
    assert found.method == method


def scale_of(value: float) -> Callable[[Tensor], Tensor]:
    def change(found: Tensor) -> Tensor:
        return found.float().index_fill(0, torch.tensor([0]), value).to(found.dtype)

    return change


TENSORS: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    ("gptq", "qweight", lambda _: None, "is missing"),
    ("gptq", "scales", lambda _: None, "is missing"),
    ("gptq", "qzeros", lambda _: None, "is missing"),
    ("gptq", "qweight", lambda found: found[1:].contiguous(), "has shape"),
    ("gptq", "qzeros", lambda found: found.long(), "has dtype int64, not int32"),
    ("gptq", "scales", scale_of(torch.inf), "not finite"),
    ("gptq", "g_idx", lambda found: found + 1, "group 4 of 4"),
    ("gptq", "g_idx", lambda found: found - 1, "group -1 of 4"),
    ("gptq", "g_idx", torch.zeros_like, "other sizes than 32"),
    ("awq", "qweight", lambda found: found[:, 1:].contiguous(), "has shape"),
    ("awq", "scales", scale_of(torch.nan), "not finite"),
    ("pack-quantized", "weight_shape", lambda found: found + 1, "is .65, 129., not .64, 128."),
    ("pack-quantized", "weight_scale", lambda found: found[:, 1:].contiguous(), "has shape"),
    ("pack-quantized-asymmetric", "weight_zero_point", lambda _: None, "is missing"),
    ("fp8-block", "weight_scale_inv", lambda _: None, "is missing"),
    ("fp8-block", "weight", lambda found: found.view(torch.int8), "has dtype int8"),
    ("mxfp4-pack-quantized", "weight_scale", lambda found: found | 255, "exponent 255"),
    ("nvfp4-pack-quantized", "weight_global_scale", torch.zeros_like, "is 0"),
    ("nf4", "weight.absmax", lambda found: found[1:].contiguous(), "has shape"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros_like, "is not JSON"),
    ("nf4-nested", "weight.nested_absmax", lambda _: None, "has dtype uint8, not float16"),
    ("llm-int8", "SCB", lambda _: None, "is missing"),
]


@pytest.mark.parametrize(("name", "kind", "change", "message"), TENSORS)
def test_damaged_tensors_are_named(
    name: str,
    kind: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    save_quantized(tmp_path, "llama", name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(f"{MODULE}.{kind}"))
    if changed is not None:
        tensors[f"{MODULE}.{kind}"] = changed
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"^tensor {MODULE}\..*{message}") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", "gptq")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model.safetensors is damaged or incomplete"):
        load(tmp_path)


def test_codes_without_settings_are_refused(tmp_path: Path) -> None:
    for name in ("fp8-block", "int-quantized"):
        save_quantized(tmp_path, "llama", name)
        edit_json(tmp_path / "config.json", quantization_config=None)
        with pytest.raises(WeightsError, match="does not hold floating-point numbers"):
            load(tmp_path)


def test_ranks_that_no_group_fits(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", "gptq-desc-act")
    with pytest.raises(UnsupportedModel, match=r"desc_act.*these numbers of shards work: 1$"):
        load(tmp_path, ProcessGroup(0, 2, torch.device("cpu")))


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "gpt2", "gptq")
    with pytest.raises(ModelError, match="quantization_config is not supported for gpt2"):
        load(tmp_path)


def without_weights(folder: Path, **fields: Any) -> None:
    """Write the config of a model whose weights must not be read."""
    config = {**CONFIGS_OF_MODELS["llama"], "model_type": "llama", **fields}
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path, group: ProcessGroup | None = None, *, quantize: str | None = None) -> None:
    load_model(
        folder,
        dtype=torch.float32,
        kernels=PlainKernels(deterministic=True),
        group=group or ProcessGroup.single(),
        device=torch.device("cpu"),
        quantize=quantize,
    )
