"""Writes the fixtures of quantised linears: `python -m millrace_testing.quantized.make_fixtures FOLDER`.

Each file has the tensors of a linear [64, 128], its quantization_config, and in `expected` the weight that the format's
own library makes of them. It needs compressed-tensors, gptqmodel, autoawq (`awq/utils/packing_utils.py` on the path as
`packing_utils`) and bitsandbytes, which the tests do not.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from millrace_testing.quantized.linears import FORMATS, GROUP, Tensors

OUTPUTS, INPUTS = 64, 128


def module(name: str) -> Any:
    """An imported library, whose types nobody knows."""
    return importlib.import_module(name)


def compressed_tensors(name: str, tensors: Tensors) -> Tensor:
    """`BaseCompressor.decompress` of a format of compressed-tensors."""
    config = FORMATS[name].config
    scheme = module("compressed_tensors.quantization").QuantizationScheme(
        **config["config_groups"]["group_0"]
    )
    base = module("compressed_tensors.compressors").BaseCompressor
    compressor = base.get_value_from_registry(config["format"])
    found: Tensor = compressor.decompress(dict(tensors), scheme)["weight"]
    return found


def gptqmodel(name: str, tensors: Tensors) -> Tensor:
    """`TorchLinear.dequantize_weight`, which has zeros of the second version."""
    config = FORMATS[name].config
    kernel = module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    linear = kernel(
        bits=config["bits"],
        group_size=GROUP,
        sym=False,
        desc_act=config["desc_act"],
        in_features=INPUTS,
        out_features=OUTPUTS,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
    )
    linear.load_state_dict(tensors)
    if config.get("checkpoint_format", "gptq") == "gptq":
        convert = module("gptqmodel.utils.model").convert_gptq_v1_to_v2_format_module
        convert(linear, bits=config["bits"], pack_dtype=torch.int32)
    linear.post_init()
    found: Tensor = linear.dequantize_weight().T
    return found


def autoawq(_: str, tensors: Tensors) -> Tensor:
    """`dequantize_gemm`."""
    dequantize = module("packing_utils").dequantize_gemm
    found: Tensor = dequantize(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP)
    return found.T


def bitsandbytes(name: str, tensors: Tensors) -> Tensor:
    """`dequantize_4bit` in float32, or `int8_vectorwise_dequant`."""
    functional = module("bitsandbytes.functional")
    if name == "llm-int8":
        found: Tensor = functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
        return found
    state = functional.QuantState.from_dict(
        {kind: tensor for kind, tensor in tensors.items() if kind != "weight"}, device="cpu"
    )
    state.dtype = torch.float32
    wide: Tensor = functional.dequantize_4bit(tensors["weight"], state)
    return wide


def fine_grained(name: str, tensors: Tensors) -> Tensor:
    """`_dequantize_fp8_weight` of transformers, which has no other for weights."""
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    dequantize = module("transformers.integrations.finegrained_fp8")._dequantize_fp8_weight
    block = FORMATS[name].config.get("weight_block_size")
    found: Tensor = dequantize(tensors["weight"], scale, block, torch.float32)
    return found


def stacked_mxfp4(_: str, tensors: Tensors) -> Tensor:
    """`convert_moe_packed_tensors` of transformers, which takes one expert [1, out, in / 32, 16]."""
    blocks = tensors["weight_packed"].view(1, OUTPUTS, INPUTS // 32, 16)
    scales = tensors["weight_scale"].view(1, OUTPUTS, INPUTS // 32)
    convert = module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    found: Tensor = convert(blocks, scales, dtype=torch.float32)
    return found[0].T


LIBRARIES: dict[str, Callable[[str, Tensors], Tensor]] = {
    **dict.fromkeys(
        ("gptq", "gptq-symmetric", "gptq-v2", "gptq-8-bits", "gptq-desc-act"), gptqmodel
    ),
    "awq": autoawq,
    **{
        name: compressed_tensors
        for name in FORMATS
        if name.partition("-")[2].startswith(("quantized", "pack-quantized"))
        and not name.startswith("mxfp4")
        and name != "pack-quantized-actorder"
    },
    "mxfp4-pack-quantized": stacked_mxfp4,
    **dict.fromkeys(("fp8-block", "fp8-tensor", "fbgemm-fp8"), fine_grained),
    **dict.fromkeys(("nf4", "nf4-nested", "fp4", "llm-int8"), bitsandbytes),
}
"""By format. The library of compressed-tensors has dropped activation order by group; modelopt has no reader here."""


def write(folder: Path) -> None:
    """Write a file for each format that has a library."""
    for name, library in LIBRARIES.items():
        tensors, _ = FORMATS[name].pack(OUTPUTS, INPUTS, torch.Generator().manual_seed(9))
        expected = library(name, {kind: tensor.clone() for kind, tensor in tensors.items()})
        save_file(
            {**tensors, "expected": expected.detach().contiguous()},
            folder / f"{name}.safetensors",
            {"config": json.dumps(FORMATS[name].config), "library": library.__name__},
        )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
