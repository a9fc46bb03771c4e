"""One checkpoint of random weights in each format, written once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench.harness.checkpoints import ensure_checkpoint
from bench.peers.engines import quantized_gguf
from bench.quantized.encoders import ENCODERS
from bench.quantized.gguf_writer import write_gguf

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
