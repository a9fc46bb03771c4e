"""Random-weight Llama checkpoints of real shapes, with a real tokenizer in which prompts count exactly.

A benchmark needs only the shapes of a model. These checkpoints are made in seconds without a download.
The end token's row of the tied head is zero, and so is its logit. The greatest of tens of thousands of
random logits is positive, so a greedy run never stops early, even on a peer without `ignore_eos`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from bench.harness.paths import MODELS_FOLDER

END_TOKEN = "<|endoftext|>"
INITIALIZER_RANGE = 0.02
MAX_POSITIONS = 8192
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Llama model with a tied head."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def head_size(self) -> int:
        """Values per attention head."""
        return self.hidden_size // self.num_heads


SHAPES = {
    "135m": Shape(
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
    ),
    "1b": Shape(
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=32768,
    ),
}


def ensure_checkpoint(name: str, *, folder: Path = MODELS_FOLDER) -> Path:
    """The folder of the checkpoint `name`, written first where it is missing."""
    target = folder / name
    if (target / "model.safetensors").exists():
        return target
    unfinished = folder / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_checkpoint(unfinished, SHAPES[name], seed=0)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    return target


def write_checkpoint(folder: Path, shape: Shape, *, seed: int) -> None:
    """Write config, tokenizer and bfloat16 weights; the same seed gives the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(_weights(shape, generator))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, shape)


def describe(folder: Path, shape: Shape) -> None:
    """Write all files of a checkpoint except its weights."""
    build_tokenizer(shape.vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", _config(shape))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_TOKEN,
            "eos_token": END_TOKEN,
            "model_max_length": MAX_POSITIONS,
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of `shape`, by the names of the Llama family."""
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    key_value = shape.num_key_value_heads * shape.head_size
    found: dict[str, tuple[int, ...]] = {
        EMBEDDING: (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape.num_layers):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        found[f"{attention}.q_proj.weight"] = (hidden, hidden)
        found[f"{attention}.k_proj.weight"] = (key_value, hidden)
        found[f"{attention}.v_proj.weight"] = (key_value, hidden)
        found[f"{attention}.o_proj.weight"] = (hidden, hidden)
        found[f"{mlp}.gate_proj.weight"] = (intermediate, hidden)
        found[f"{mlp}.up_proj.weight"] = (intermediate, hidden)
        found[f"{mlp}.down_proj.weight"] = (hidden, intermediate)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
    return found


def _weights(shape: Shape, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for name, sizes in tensor_shapes(shape).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(sizes, dtype=torch.bfloat16)
            continue
        values = torch.randn(sizes, generator=generator) * INITIALIZER_RANGE
        if name == EMBEDDING:
            values[0] = 0
        yield name, values.to(torch.bfloat16)


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens.

    After the end token and the 256 bytes, each token is a space and one to four lower-case letters,
    merged letter by letter, short words first. A word of up to two letters is one token, and from
    18 535 tokens on also each word of three. ValueError when the size leaves no room for every word
    of two letters.
    """
    vocab: dict[str, int] = {END_TOKEN: 0}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    merges: list[tuple[str, str]] = []
    for stem, letter in _stems(max_letters=4):
        if len(vocab) == vocab_size:
            break
        merges.append((stem, letter))
        vocab[stem + letter] = len(vocab)
    if len(vocab) < vocab_size or "Ġzz" not in vocab:
        raise ValueError(f"no such tokenizer of {vocab_size} tokens")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    return tokenizer


def _stems(*, max_letters: int) -> Iterator[tuple[str, str]]:
    """Every merge of a token with one more letter, short tokens first."""
    letters = string.ascii_lowercase
    for length in range(max_letters):
        for stem in itertools.product(letters, repeat=length):
            for letter in letters:
                yield "Ġ" + "".join(stem), letter
