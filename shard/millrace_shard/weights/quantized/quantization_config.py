"""Finds how the checkpoint in a folder is quantised, and compares that with `--quantize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.weights.gguf.known_folders import MODEL
from millrace_shard.weights.json_object import read_json_object
from millrace_shard.weights.quantized.bitsandbytes import bitsandbytes
from millrace_shard.weights.quantized.compressed_tensors import compressed_tensors
from millrace_shard.weights.quantized.fp4 import modelopt_nvfp4, mxfp4
from millrace_shard.weights.quantized.fp8 import fbgemm_fp8, fp8, modelopt_fp8
from millrace_shard.weights.quantized.gptq import auto_round_awq, auto_round_gptq, awq, gptq
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.quantized.settings import Settings

READERS: dict[str, Callable[[Settings], Quantization]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fbgemm_fp8,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": lambda _: mxfp4(),
}
"""By `quant_method`; auto-round and modelopt have several layouts."""
AUTO_ROUND = {"auto_round:auto_gptq": auto_round_gptq, "auto_round:auto_awq": auto_round_awq}
MODELOPT = {"FP8": modelopt_fp8, "NVFP4": modelopt_nvfp4}
SUPPORTED = (*READERS, "auto-round", "modelopt")
ACCEPTED = {
    "marlin": ("awq", "gptq"),
    "fp8": ("fbgemm_fp8", "fp8", "modelopt"),
}
"""Values of --quantize that stand for methods with other names."""
FROM_CHECKPOINT = ("awq", "compressed-tensors", "exl2", "gptq", "marlin")
"""Values of --quantize that need a checkpoint of that method."""

TRANSFORMS = ("transform_config", "rotation_config", "hadamard_config")
"""Fields of compressed-tensors and auto-round that change what linears are multiplied with."""


def read_quantization(folder: Path, flag: str | None) -> Quantization | None:
    """The quantisation of the checkpoint in `folder`; None if it is not quantised.

    Raises UnsupportedModel for methods that are not supported, and if --quantize, which is `flag`, contradicts it.
    """
    if flag == "exl2":
        raise UnsupportedModel(
            f"--quantize exl2 is not supported; weights of these methods are: {', '.join(SUPPORTED)}"
        )
    if (folder / MODEL).is_file():
        if flag is not None:
            raise UnsupportedModel(
                f"--quantize {flag}: a GGUF file says itself how it is quantised"
            )
        return None
    raw = _raw_config(folder)
    if raw is None:
        if flag in FROM_CHECKPOINT:
            raise UnsupportedModel(
                f"--quantize {flag} needs a checkpoint with {flag} weights, and that in {folder} is not quantised"
            )
        return None
    config = _read(raw)
    if flag is not None and config.method not in ACCEPTED.get(flag, (flag,)):
        raise UnsupportedModel(
            f"--quantize {flag} contradicts config.json, which says {config.method}; leave the flag out"
        )
    return config


def is_quantized(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is quantised. Raises UnsupportedModel for methods that are not supported."""
    return (folder / MODEL).is_file() or read_quantization(folder, None) is not None


def _read(raw: Mapping[str, Any]) -> Quantization:
    method = raw.get("quant_method")
    for name in TRANSFORMS:
        if raw.get(name) not in (None, {}, {"config_groups": {}}):
            raise UnsupportedModel(
                f"{method}: {name} is not supported; activations would have to be transformed"
            )
    if isinstance(method, str):
        method = method.lower().replace("_", "-") if "compressed" in method else method.lower()
    if method in ("auto-round", "intel/auto-round"):
        settings = Settings("auto-round", raw)
        settings.choice("data_type", allowed=("int",), default="int")
        layout = settings.choice("packing_format", allowed=tuple(AUTO_ROUND))
        return AUTO_ROUND[layout](settings)
    if method == "modelopt":
        settings = Settings("modelopt", raw)
        return MODELOPT[settings.choice("quant_algo", allowed=tuple(MODELOPT))]()
    if not isinstance(method, str) or method not in READERS:
        raise UnsupportedModel(
            f"quant_method={method!r} in quantization_config is not supported; these are: {', '.join(SUPPORTED)}"
        )
    return READERS[method](Settings(method, raw))


def _raw_config(folder: Path) -> Mapping[str, Any] | None:
    """The object that describes the quantisation of the weights, from config.json or one of the files next to it."""
    config = read_json_object(folder / "config.json") or {}
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if part.get(name) is not None:
                return _object(part[name], name)
    gptq_file = read_json_object(folder / "quantize_config.json")
    if gptq_file is not None:
        return {"quant_method": "gptq", **gptq_file}
    awq_file = read_json_object(folder / "quant_config.json")
    if awq_file is not None:
        return {"quant_method": "awq", **awq_file}
    modelopt = read_json_object(folder / "hf_quant_config.json")
    if modelopt is not None:
        return {"quant_method": "modelopt", **_object(modelopt.get("quantization"), "quantization")}
    return None


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{name}={value!r} must be an object")
    return value
