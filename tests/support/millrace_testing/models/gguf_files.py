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
Floats = npt.NDArray[np.float32]

PLAIN = ("F32", "F16", "BF16")
SCALES = {
    **dict.fromkeys(("Q4_0", "Q4_1"), 0.03),
    **dict.fromkeys(("Q5_0", "Q5_1"), 0.015),
    **dict.fromkeys(("Q8_0", "IQ4_NL"), 0.002),
    **dict.fromkeys(("Q4_K", "Q5_K", "Q6_K", "IQ3_XXS", "IQ3_S"), 0.0002),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "Q3_K"), 0.001),
    **dict.fromkeys(("IQ1_S", "IQ1_M"), 0.01),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), 0.1),
    "Q2_K": 0.004,
    "IQ4_XS": 0.00005,
}
"""Block types with scales in float16, and the largest that give values like those of weights."""
HALVES = {
    **dict.fromkeys(SCALES, (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ1_M": (48,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Offsets of the float16 numbers in a block."""
BYTES = {"MXFP4": (1, 118, 124), "NVFP4": (4, 16, 32)}
"""Block types whose scales are the first bytes, their number and range."""
BLOCK_TYPES = (*PLAIN, *SCALES, *BYTES)
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


ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo3": "olmo2",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""Names in files of families that have another name there."""
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PLAIN_ENDS = ("gate.weight", "router.weight", ".bias", "sinks.weight", "conv1d.weight")
"""Ends the names of tensors that files have as float32."""
WIDE, SLIDING = {"head_dim": 64}, {"sliding_window": 12, "num_hidden_layers": 5}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
DELTA_NET = {
    "head_dim": 128,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}
"""Each key has three values, three heads of which fill one and a half blocks of a row."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | MIXTURE | {"shared_expert_intermediate_size": 512},
    "qwen3": WIDE,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2_moe": MIXTURE | {"shared_expert_intermediate_size": 512, "norm_topk_prob": False},
    "qwen3_moe": MIXTURE | WIDE | {"norm_topk_prob": True},
    "gemma": WIDE,
    "gemma2": WIDE | {"query_pre_attn_scalar": 64, "sliding_window": 12},
    "gemma3_text": WIDE
    | {"query_pre_attn_scalar": 64, "sliding_window": 12, "num_hidden_layers": 7},
    "gpt_oss": WIDE
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}
    | {"sliding_window": 12, "rope_parameters": YARN},
    "granite": {
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "smollm3": {"num_hidden_layers": 5},
    "seed_oss": WIDE | {"attention_bias": True, "attention_out_bias": False},
    "ernie4_5": WIDE,
    "hunyuan_v1_dense": WIDE,
    "glm4": WIDE,
    "cohere2": SLIDING | {"logit_scale": 0.5},
    "cohere": {"logit_scale": 0.5},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
    "olmo3": SLIDING,
    "exaone4": SLIDING,
}
"""Fields of config.json for tiny models."""


def random_blocks(kind: str, shape: Sequence[int], seed: int) -> Bytes:
    """Rows of random blocks with values like those of weights, [outputs, bytes of a row]."""
    generator = np.random.default_rng(seed)
    if kind in PLAIN:
        values = generator.standard_normal(shape).astype(np.float32) * 0.1
        found: Bytes = gguf.quants.quantize(values, BlockType[kind]).view(np.uint8)
        return found
    elements, num_bytes = gguf.GGML_QUANT_SIZES[BlockType[kind]]
    count = shape[-1] // elements
    blocks = generator.integers(0, 256, (*shape[:-1], count, num_bytes), dtype=np.uint8)
    for place in HALVES.get(kind, ()):
        scale = SCALES[kind] * generator.uniform(-1, 1, (*shape[:-1], count))
        set_halves(kind, blocks, place, scale.astype(np.float16))
    if kind in BYTES:
        end, low, high = BYTES[kind]
        blocks[..., :end] = generator.integers(low, high, (*shape[:-1], count, end))
    return blocks.reshape(*shape[:-1], count * num_bytes)


def set_halves(kind: str, blocks: Bytes, place: int, values: npt.NDArray[np.float16]) -> None:
    """Set the number at byte `place` of each of `blocks` [..., bytes] to `values` [...]."""
    stored = np.ascontiguousarray(values).view(np.uint16)
    if kind == "IQ1_M":
        # The upper four bits of four numbers of 16 bits.
        for part in range(4):
            upper = (stored >> (4 * part) & 15).astype(np.uint8) << 4
            at = place + 2 * part + 1
            blocks[..., at] = blocks[..., at] & 15 | upper
        return
    blocks[..., place], blocks[..., place + 1] = stored & 255, stored >> 8


def rotated_rows(num_heads: int, rows: int) -> npt.NDArray[np.int64]:
    """The row of transformers for each row of a projection in the order of llama.cpp's `LlamaModel.permute`."""
    order = np.arange(rows).reshape(num_heads, 2, rows // num_heads // 2)
    return order.swapaxes(1, 2).reshape(rows)


class TinyGguf:
    """A random model of one of our families; `kind` is the block type of its matrices, `kinds` of those with a name.

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
        kinds: Mapping[str, str] | None = None,
        **config: Any,
    ) -> None:
        self.family = family
        self.arch = ARCHITECTURES.get(family, family)
        fields = SIZES | {"pad_token_id": 0} | FAMILIES.get(family, {}) | config
        if family == "llama":
            fields |= {"attention_bias": biases, "mlp_bias": biases}
        self.config = AutoConfig.for_model(family, bos_token_id=1, eos_token_id=2, **fields)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._kind = kind
        self._kinds = kinds or {}
        self._seed = seed
        self.metadata = {**self._metadata(), **tokenizer_metadata(), **(metadata or {})}
        self.tensors: dict[str, tuple[Bytes, str]] = {}
        """Bytes and block types by the names in the file."""
        self._make_tensors()

    def write(self, path: Path, *, per_part: int = 0, bare_first: bool = False) -> Path:
        """Write the file, or parts of `per_part` tensors, whose names begin with the stem of `path`.

        With `bare_first`, the first part has no tensors.
        """
        writer = gguf.GGUFWriter(
            path, self.arch, split_max_tensors=per_part, small_first_shard=bare_first
        )
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
        arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[self.arch]
        names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
        parameters = dict(self.model.named_parameters())
        parts = [part for each in parameters.items() for part in self._parts(*each)]
        for number, (name, values_of) in enumerate(parts):
            named = (kind for part, kind in self._kinds.items() if f".{part}." in name)
            is_plain = values_of.ndim == 1 or name.endswith(PLAIN_ENDS)
            kind = "F32" if is_plain else next(named, self._kind)
            data = random_blocks(kind, values_of.shape, seed=1000 * self._seed + number)
            values = gguf.quants.dequantize(data, BlockType[kind])
            if name.endswith("norm.weight"):
                data = (values + 1).astype(np.float32).view(np.uint8)
                is_shifted = self.family.startswith(("gemma", "qwen3_5")) and ".linear_" not in name
                values = data.view(np.float32) - np.float32(is_shifted)
            elif ".linear_attn." in name:
                data, values = self._of_delta_net(name, data, values)
            with torch.no_grad():
                values_of.copy_(torch.from_numpy(values.copy()))
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            self.tensors[stored] = (self._in_file_order(name, data, values_of), kind)
        for factors in ("long", "short"):
            divisors = getattr(self.config, "rope_parameters", {}).get(f"{factors}_factor")
            if divisors is not None:
                data = np.array(divisors, np.float32).view(np.uint8)
                self.tensors[f"rope_factors_{factors}.weight"] = (data, "F32")

    def _parts(self, name: str, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """Names that llama.cpp's converters give the parts of a parameter, and the parts as views."""
        module = name.removesuffix("_bias")
        suffix = ".bias" if module != name else ".weight"
        if ".experts." not in name:
            return [self._single(name, parameter)]
        views = {"down_proj": parameter}
        if module.endswith("gate_up_proj"):
            # Experts of gpt-oss are transposed, and its gates and ups alternate.
            whole = parameter
            if self.family == "gpt_oss":
                whole = parameter if suffix == ".bias" else parameter.transpose(-1, -2)
                halves = [whole[:, ::2], whole[:, 1::2]]
            else:
                halves = list(whole.chunk(2, dim=1))
            views = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
        elif self.family == "gpt_oss" and suffix == ".weight":
            views = {"down_proj": parameter.transpose(-1, -2)}
        base = module.rpartition(".")[0]
        if self.family == "mixtral":
            base = base.removeprefix("model.").replace("mlp", "feed_forward")
            views = {MIXTRAL[part]: view for part, view in views.items()}
        return [(f"{base}.{part}{suffix}", view) for part, view in views.items()]

    def _single(self, name: str, parameter: Tensor) -> tuple[str, Tensor]:
        """The same of a parameter other than experts."""
        if name.endswith("sinks"):
            return f"{name}.weight", parameter
        if name.endswith(".dt_bias"):
            return name.replace("dt_bias", "dt_proj.bias"), parameter
        if name.endswith(".conv1d.weight"):
            return name, parameter[:, 0]
        if name.endswith("shared_expert_gate.weight"):
            return name, parameter[0]
        if self.family == "mixtral" and name.endswith("mlp.gate.weight"):
            return name.replace("mlp.gate", "block_sparse_moe.gate"), parameter
        return name, parameter

    def _of_delta_net(self, name: str, data: Bytes, values: Floats) -> tuple[Bytes, Floats]:
        """What the file has, and what the model has for it: undoes `_LinearAttentionVReorderBase` of llama.cpp."""
        config = self.config
        keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
        part, behind = name.split(".")[4], 0
        if part == "A_log":
            data = (-np.exp(values)).astype(np.float32).view(np.uint8)
        if part in ("in_proj_qkv", "conv1d"):
            behind = 2 * keys * config.linear_key_head_dim
        axis = int(part == "out_proj")
        first, rest = np.split(values, [behind], axis=axis)
        size = rest.shape[axis] // heads
        shape = *rest.shape[:axis], heads // keys, keys, size, *rest.shape[axis + 1 :]
        grouped = np.moveaxis(rest.reshape(shape), axis, axis + 1).reshape(rest.shape)
        return data, np.concatenate((first, grouped), axis=axis)

    def _in_file_order(self, name: str, data: Bytes, values: Tensor) -> Bytes:
        heads = {
            "q_proj": self.config.num_attention_heads,
            "k_proj": self.config.num_key_value_heads,
        }
        count = next((count for part, count in heads.items() if f".{part}." in name), None)
        if self.arch not in ("llama", "granite", "smollm3") or count is None:
            return data
        rows = data.reshape(len(values), -1)[rotated_rows(count, len(values))]
        return rows.reshape(data.shape)

    def _metadata(self) -> dict[str, Any]:
        """What llama.cpp's converters write, by `TextModel.set_gguf_parameters` and its overrides."""
        config = self.config
        whole = dict(config.rope_parameters)
        parameters = whole.get("full_attention", whole)
        local = whole.get("sliding_attention", {}).get("rope_theta")
        window = getattr(config, "sliding_window", None)
        values = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": getattr(config, "intermediate_size", None),
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
            "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", None),
            "rope.freq_base": float(parameters["rope_theta"]),
            "rope.freq_base_swa": local and float(local),
            "expert_count": getattr(
                config, "num_local_experts", getattr(config, "num_experts", None)
            ),
            "expert_used_count": getattr(config, "num_experts_per_tok", None),
            "attention.key_length": getattr(config, "head_dim", None),
            "attention.value_length": getattr(config, "head_dim", None),
            **_scaling(parameters),
            **self._more(parameters, window),
        }
        if self.family in ("gemma", "gemma2"):
            del values["rope.freq_base"]
        return {f"{self.arch}.{name}": value for name, value in values.items() if value is not None}

    def _more(self, parameters: Mapping[str, Any], window: int | None) -> dict[str, Any]:
        config, family = self.config, self.family
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // 4
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        if family.startswith("gemma"):
            return {
                "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
                "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
                "attention.sliding_window": window,
            }
        if family in ("qwen2_moe", "qwen3_moe"):
            shared = getattr(config, "shared_expert_intermediate_size", None)
            return {
                "expert_feed_forward_length": config.moe_intermediate_size,
                "expert_shared_feed_forward_length": shared,
            }
        if family.startswith("qwen3_5"):
            return self._of_hybrid(rotated)
        if family == "gpt_oss":
            width = {"expert_feed_forward_length": config.intermediate_size}
            return {"attention.sliding_window": window, **width}
        if family == "phi3":
            return {
                "rope.scaling.original_context_length": parameters.get(
                    "original_max_position_embeddings", config.max_position_embeddings
                ),
                "rope.dimension_count": rotated,
                "attention.sliding_window": window or 0,
                "attention.key_length": None,
                "attention.value_length": None,
            }
        if family == "hunyuan_v1_dense":
            return _alpha(parameters, head_dim)
        if family == "glm4":
            return {"rope.dimension_count": rotated}
        return self._of_llama(head_dim, window)

    def _of_hybrid(self, rotated: int) -> dict[str, Any]:
        config = self.config
        values = config.linear_num_value_heads
        return {
            "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
            "expert_shared_feed_forward_length": getattr(
                config, "shared_expert_intermediate_size", None
            ),
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": values,
            "ssm.inner_size": values * config.linear_value_head_dim,
            "full_attention_interval": 4,
            "rope.dimension_count": rotated,
            "rope.dimension_sections": [11, 11, 10, 0],
        }

    def _of_llama(self, head_dim: int, window: int | None) -> dict[str, Any]:
        config, family = self.config, self.family
        sizes = {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
        if family in ("llama", "smollm3", "mixtral"):
            return sizes
        if family == "mistral":
            return sizes | {"attention.sliding_window": window}
        if family == "granite":
            return sizes | {
                "attention.scale": config.attention_multiplier,
                "embedding_scale": config.embedding_multiplier,
                "residual_scale": config.residual_multiplier,
                "logit_scale": config.logits_scaling,
            }
        if family == "cohere":
            return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
        if family == "cohere2":
            more = {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
            return sizes | more | {"attention.sliding_window": window}
        if family in ("olmo3", "exaone4") and window:
            pattern = [kind == "sliding_attention" for kind in config.layer_types]
            return {
                "attention.sliding_window": window,
                "attention.sliding_window_pattern": pattern,
                "vocab_size": config.vocab_size if family == "exaone4" else None,
            }
        return {}


def _scaling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = parameters.get("rope_type")
    if kind not in ("linear", "yarn", "longrope"):
        return {}
    values = {
        "type": kind,
        "factor": parameters.get("factor") if kind != "longrope" else None,
        "original_context_length": parameters.get("original_max_position_embeddings"),
        "yarn_beta_fast": parameters.get("beta_fast"),
        "yarn_beta_slow": parameters.get("beta_slow"),
        "attn_factor": parameters.get("attention_factor") if kind == "longrope" else None,
    }
    return {f"rope.scaling.{name}": value for name, value in values.items() if value is not None}


def _alpha(parameters: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Hunyuan's base, which alpha scales."""
    if not parameters.get("alpha"):
        return {}
    scale = parameters["alpha"] ** (head_dim / (head_dim - 2))
    return {
        "rope.freq_base": float(parameters["rope_theta"] * scale),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 262144,
        "context_length": 262144,
    }


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
