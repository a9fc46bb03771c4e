"""Random EAGLE and EAGLE-3 heads as they are published, and what they compute by the formulas of their papers' code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

EPS, THETA = 1e-6, 1e4
HEADS, KV_HEADS, HEAD_DIM, INTER = 4, 2, 16, 48
TAPS = (2, 3, 1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rotated(x: Tensor) -> Tensor:
    """`x` [T, heads, HEAD_DIM] at positions 0, 1, …, by Llama's halves."""
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(len(x)).float()[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


@dataclass
class EagleHead:
    """A head of `target`, which has four layers, without a cache: each call computes a whole sequence."""

    target: PreTrainedModel
    is_third: bool
    draft_vocab: int | None = None
    norm_before_residual: bool = False
    bias: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        hidden = self.target.config.hidden_size
        wide = 2 * hidden if self.is_third else hidden
        prefix = self.prefix
        shapes = {
            "fc.weight": (hidden, (len(TAPS) if self.is_third else 2) * hidden),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, wide),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, wide),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, wide),
            f"{prefix}self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": (INTER, hidden),
            f"{prefix}mlp.up_proj.weight": (INTER, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, INTER),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
        if self.bias:
            shapes["fc.bias"] = (hidden,)
        if self.is_third:
            shapes |= {f"{prefix}{name}.weight": (hidden,) for name in _NORMS} | {
                "norm.weight": (hidden,)
            }
        vocab = self.target.config.vocab_size
        if self.draft_vocab is not None:
            shapes["lm_head.weight"] = (self.draft_vocab, hidden)
            kept = torch.randperm(vocab, generator=generator)[: self.draft_vocab].sort().values
            self.tensors["d2t"] = kept - torch.arange(self.draft_vocab)
            self.tensors["t2d"] = torch.isin(torch.arange(vocab), kept)
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            self.tensors[name] = noise * 0.15 if len(shape) > 1 else 1 + noise * 0.1

    @property
    def prefix(self) -> str:
        return "midlayer." if self.is_third else "layers.0."

    def save(self, folder: Path, **changes: Any) -> Path:
        """Write the head to `folder`; `changes` are of its config, of which None removes a field."""
        folder.mkdir(exist_ok=True)
        save_file(
            {name: value.contiguous() for name, value in self.tensors.items()},
            folder / "model.safetensors",
        )
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3" if self.is_third else "LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.target.config.hidden_size,
            "intermediate_size": INTER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 32,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "vocab_size": self.target.config.vocab_size,
        }
        if self.is_third:
            config["draft_vocab_size"] = self.draft_vocab or self.target.config.vocab_size
            config["norm_before_residual"] = self.norm_before_residual
            config["eagle_aux_hidden_state_layer_ids"] = list(TAPS)
        config |= changes
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    def inputs(self, ids: Sequence[int]) -> Tensor:
        """The states [T, hidden] that the head reads of the target over `ids`."""
        with torch.no_grad():
            base = self.target.model(torch.tensor([list(ids)]), output_hidden_states=True)
        if not self.is_third:
            last: Tensor = base.last_hidden_state[0]
            return last
        wide = torch.cat([base.hidden_states[tap][0] for tap in TAPS], dim=-1)
        return self._fc(wide)

    def _fc(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors["fc.weight"], self.tensors.get("fc.bias"))

    def results(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """The results [T, hidden] of the layer over `states` and the tokens after theirs."""
        t, prefix = self.tensors, self.prefix
        with torch.no_grad():
            embedded = self.target.get_input_embeddings()(torch.tensor(list(tokens)))
        if self.is_third:
            normed = _norm(states, t[f"{prefix}hidden_norm.weight"])
            x = torch.cat([_norm(embedded, t[f"{prefix}input_layernorm.weight"]), normed], dim=-1)
            residual = normed if self.norm_before_residual else states
        else:
            x = residual = self._fc(torch.cat([embedded, states], dim=-1))
        q, k, v = (
            (x @ t[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM)
            for name in "qkv"
        )
        q, k = _rotated(q), _rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        flat = attended.transpose(0, 1).flatten(1)
        residual = residual + flat @ t[f"{prefix}self_attn.o_proj.weight"].T
        y = _norm(residual, t[f"{prefix}post_attention_layernorm.weight"])
        gate, up = (y @ t[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return residual + (F.silu(gate) * up) @ t[f"{prefix}mlp.down_proj.weight"].T

    def token(self, result: Tensor) -> int:
        """The likeliest token after a result [hidden]."""
        if not self.is_third or "lm_head.weight" not in self.tensors:
            with torch.no_grad():
                return int(self.target.lm_head(self.features(result)).argmax())
        best = int((self.tensors["lm_head.weight"] @ self.features(result)).argmax())
        return best + (int(self.tensors["d2t"][best]) if "d2t" in self.tensors else 0)

    def features(self, result: Tensor) -> Tensor:
        """What the output head reads."""
        return _norm(result, self.tensors["norm.weight"]) if self.is_third else result

    def draft(self, ids: Sequence[int], most: int) -> list[tuple[int, Tensor]]:
        """The chain of drafts after `ids`, whose last token the target has not computed, each with its result."""
        states, tokens, drafts = self.inputs(ids[:-1]), list(ids[1:]), []
        for _ in range(most):
            result = self.results(states, tokens)[-1]
            drafts.append((self.token(result), result))
            states, tokens = torch.cat([states, result[None]]), [*tokens, drafts[-1][0]]
        return drafts


_NORMS = ("hidden_norm", "input_layernorm")
