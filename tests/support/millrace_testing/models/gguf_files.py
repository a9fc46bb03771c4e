"""Tiny random GGUF files, written by ggml's own package, and the models of transformers with the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as BlockType
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Bytes = npt.NDArray[np.uint8]

BLOCK_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}
"""Offsets of the float16 numbers in a block."""
SCALES = {"Q4_0": 0.03, "Q4_1": 0.03, "Q5_0": 0.015, "Q5_1": 0.015, "Q8_0": 0.002}
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
SIZES = {
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""Widths that hold blocks of 256 values."""


def random_blocks(kind: str, shape: Sequence[int], seed: int) -> Bytes:
    """Rows of random blocks with values like those of weights, [outputs, bytes of a row]."""
    generator = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = generator.standard_normal(shape).astype(np.float32) * 0.1
        found: Bytes = gguf.quants.quantize(values, BlockType[kind]).view(np.uint8)
        return found
    elements, num_bytes = gguf.GGML_QUANT_SIZES[BlockType[kind]]
    count = shape[-1] // elements
    blocks = generator.integers(0, 256, (*shape[:-1], count, num_bytes), dtype=np.uint8)
    for place in HALVES[kind]:
        scale = SCALES.get(kind, 0.0002) * generator.uniform(-1, 1, (*shape[:-1], count, 1))
        blocks[..., place : place + 2] = scale.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], count * num_bytes)


def rotated_rows(num_heads: int, rows: int) -> npt.NDArray[np.int64]:
    """The row of transformers for each row of a projection in the order of llama.cpp's `LlamaModel.permute`."""
    order = np.arange(rows).reshape(num_heads, 2, rows // num_heads // 2)
    return order.swapaxes(1, 2).reshape(rows)


class TinyGguf:
    """A random model of one of our families; `kind` is the block type of its matrices.

    `metadata` is added to that of the model, and replaces it; None removes a key. `biases` are those of all linears.
    """

    def __init__(
        self,
        family: str,
        kind: str = "F32",
        *,
        seed: int = 0,
        metadata: Mapping[str, Any] | None = None,
        biases: bool = False,
        **config: Any,
    ) -> None:
        self.arch = "llama" if family == "mistral" else family
        fields = SIZES | {"qwen3": {"head_dim": 64}}.get(family, {}) | config
        if family == "llama":
            fields |= {"attention_bias": biases, "mlp_bias": biases}
        self.config = AutoConfig.for_model(family, bos_token_id=1, eos_token_id=2, **fields)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._kind = kind
        self._seed = seed
        self.metadata = {**self._metadata(), **tokenizer_metadata(), **(metadata or {})}
        self.tensors: dict[str, tuple[Bytes, str]] = {}
        """Bytes and block types by the names in the file."""
        self._make_tensors()

    def write(self, path: Path) -> Path:
        """Write the file."""
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.metadata.items():
            if value is not None and key != "general.architecture":
                add_value(writer, key, value)
        for name, (data, kind) in self.tensors.items():
            if kind == "F32":
                writer.add_tensor(name, data.view(np.float32))
            else:
                writer.add_tensor(name, data, raw_dtype=BlockType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _make_tensors(self) -> None:
        """Fill the model and the tensors of the file."""
        names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH[self.arch.upper()], self.config.num_hidden_layers
        )
        parameters = dict(self.model.named_parameters())
        for number, (name, parameter) in enumerate(parameters.items()):
            kind = self._kind if parameter.ndim > 1 else "F32"
            data = random_blocks(kind, parameter.shape, seed=1000 * self._seed + number)
            values = gguf.quants.dequantize(data, BlockType[kind])
            if parameter.ndim == 1:
                data = (values + ("norm" in name)).astype(np.float32).view(np.uint8)
                values = data.view(np.float32)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(values.copy()))
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None
            self.tensors[stored] = (self._in_file_order(name, data, parameter), kind)

    def _in_file_order(self, name: str, data: Bytes, parameter: Tensor) -> Bytes:
        heads = {
            "q_proj": self.config.num_attention_heads,
            "k_proj": self.config.num_key_value_heads,
        }
        found = next((count for part, count in heads.items() if f".{part}." in name), None)
        if self.arch != "llama" or found is None:
            return data
        rows = data.reshape(len(parameter), -1)[rotated_rows(found, len(parameter))]
        return rows.reshape(data.shape)

    def _metadata(self) -> dict[str, Any]:
        config = self.config
        parameters = dict(config.rope_parameters)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // 4
        found = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.freq_base": float(parameters["rope_theta"]),
        }
        if self.arch != "qwen2":
            found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        if self.arch == "llama":
            found |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
        if config.model_type == "mistral" and config.sliding_window:
            found["attention.sliding_window"] = config.sliding_window
        return {f"{self.arch}.{name}": value for name, value in found.items()}


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level tokenizer: three control tokens, the alphabet, a few merges and a user's token."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), *words]
    kinds = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3) + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tokens, "<think>"],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a value as the converters of llama.cpp do: counts as uint32, numbers as float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def read_config(folder: Path) -> dict[str, Any]:
    """The object in the config.json of a prepared folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
