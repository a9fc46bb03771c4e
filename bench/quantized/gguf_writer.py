"""Writes one of our Llama checkpoints as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write linears and embedding in the block format `kind`, and norms in float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    _add_config(writer, config)
    _add_tokenizer(writer, Tokenizer.from_file(str(folder / "tokenizer.json")))
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118
            name = key.removesuffix(".weight")
            tensor: Tensor = tensors.get_tensor(key).float()
            module = name.split(".", 3)[-1]
            if module in heads:
                tensor = interleaved(tensor, heads[module])
            if tensor.dim() == 1:
                writer.add_tensor(stored_name(name), tensor.numpy())
            else:
                data = gguf.quants.quantize(tensor.numpy(), kind)
                writer.add_tensor(stored_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The rows of queries or keys in the order of interleaved rotary embeddings, which llama.cpp computes."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def stored_name(name: str) -> str:
    """The name of a module's weight in GGUF."""
    if name.startswith("model.layers."):
        _, _, layer, module = name.split(".", 3)
        return f"blk.{layer}.{NAMES[module]}.weight"
    return {"model.embed_tokens": "token_embd.weight", "model.norm": "output_norm.weight"}[name]


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    state = json.loads(tokenizer.to_str())
    ids = {number: text for text, number in tokenizer.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids[number] for number in range(len(ids))])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([normal if number else control for number in range(len(ids))])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(value=False)
