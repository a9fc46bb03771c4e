"""One checkpoint of random weights in each format, written once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench.harness.checkpoints import ensure_checkpoint
from bench.peers.engines import quantized_gguf
from bench.quantized.gguf_writer import write_gguf

GROUP = 128
"""Inputs that share a scale in 4 bits."""
Encoder = Callable[[str, Tensor], dict[str, Tensor]]
"""Maps a module's name and its weight [out, in] to the tensors of the file; rounds to nearest."""


def int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 for -8 to 7 [out, in] int32, and scales [out, groups] float16."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7.5).to(torch.float16)
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7) + 8
    return codes.flatten(1).to(torch.int32), scales


def words(codes: Tensor) -> Tensor:
    """Eight codes of the last axis in each int32, the first in its lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    packed = (codes.long().reshape(len(codes), -1, 8) << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def compressed_int4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """`pack-quantized` of compressed-tensors."""
    codes, scales = int4(weight)
    return {
        f"{name}.weight_packed": words(codes),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def compressed_int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """`int-quantized` of compressed-tensors, with a scale for each output."""
    wide = weight.float()
    scales = (wide.abs().amax(1, keepdim=True) / 127.5).to(torch.bfloat16)
    codes = (wide / scales.float()).round().clamp(-128, 127)
    return {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scales}


def _compressed(bits: int, method: str) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    by_group = {"strategy": "group", "group_size": GROUP}
    by_output = {"strategy": "channel", "group_size": None}
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        **(by_group if bits == 4 else by_output),
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": method,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head"],
    }


ENCODERS: Mapping[str, tuple[Encoder, dict[str, Any]]] = {
    "compressed-int4": (compressed_int4, _compressed(4, "pack-quantized")),
    "compressed-int8": (compressed_int8, _compressed(8, "int-quantized")),
}
"""By name: the encoder of a linear and the `quantization_config` of the checkpoint."""
GGUF_TYPES = {
    "q4_0.gguf": gguf.GGMLQuantizationType.Q4_0,
    "q8_0.gguf": gguf.GGMLQuantizationType.Q8_0,
}
LLAMA_TYPES = {"q4_k_m.gguf": "Q4_K_M"}
"""Mixtures that llama.cpp's own program writes."""
BFLOAT16 = "bf16"
FORMATS = (BFLOAT16, *ENCODERS, *GGUF_TYPES, *LLAMA_TYPES)


def ensure_format(model: str, name: str) -> Path:
    """The checkpoint `model` in the format `name`, a folder or a GGUF file, written first where it is missing."""
    folder = ensure_checkpoint(model)
    if name == BFLOAT16:
        return folder
    target = folder.with_name(f"{folder.name}-{name}")
    if target.exists():
        return target
    unfinished = target.with_name(f"{target.name}.unfinished")
    if name in GGUF_TYPES:
        write_gguf(folder, unfinished, GGUF_TYPES[name])
    elif name in LLAMA_TYPES:
        quantized_gguf(folder, unfinished, LLAMA_TYPES[name])
    else:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _write_folder(folder, unfinished, name)
    unfinished.rename(target)
    return target


def file_bytes(path: Path) -> int:
    """Bytes of the weights of a checkpoint."""
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def _write_folder(source: Path, target: Path, name: str) -> None:
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    _, described = ENCODERS[name]
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = described
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = dict(_encoded(source / "model.safetensors", name))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _encoded(file: Path, name: str) -> Iterator[tuple[str, Tensor]]:
    encode, _ = ENCODERS[name]
    with safe_open(file, "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118
            tensor: Tensor = tensors.get_tensor(key)
            if key.endswith("_proj.weight"):
                yield from encode(key.removesuffix(".weight"), tensor).items()
            else:
                yield key, tensor.to(torch.bfloat16)
