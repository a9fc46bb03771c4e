"""Trains the demo model's EAGLE-3 head: `python -m demo.train_head`.

The head learns to write what the model would write, as in arXiv 2503.01840: also after its own guesses, whose states
take the place of the model's. The result is in the format of published heads.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from demo import corpus, measure
from demo.train import CONTEXT, IGNORE, Sample, batches, encode

HEAD = Path(__file__).parent / "eagle3"
NUM_CONVERSATIONS = 12_000
TAPS = (2, 3, 4)
"""Layers after which the head reads hidden states."""
DEPTH = 3
"""Tokens that the head learns to guess in a row."""
DRAFT_VOCAB = 1024
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER = 256, 4, 2, 64, 160
EPS, THETA = 1e-6, 10_000.0
PEAK_RATE = 3e-3
CHECKPOINT_STEPS = 20


class Head(nn.Module):
    """One layer that reads embedding and state side by side."""

    def __init__(self, base: LlamaForCausalLM, kept: Tensor) -> None:
        """The output head begins with the rows of the model's for the tokens `kept` [DRAFT_VOCAB]."""
        super().__init__()
        kv = KV_HEADS * HEAD_DIM
        self.fc = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False)
        self.qkv = nn.Linear(2 * HIDDEN, HEADS * HEAD_DIM + 2 * kv, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INTER, bias=False)
        self.up = nn.Linear(HIDDEN, INTER, bias=False)
        self.down = nn.Linear(INTER, HIDDEN, bias=False)
        self.input_norm, self.hidden_norm, self.mlp_norm, self.last_norm = (
            nn.RMSNorm(HIDDEN, eps=EPS) for _ in range(4)
        )
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(base.lm_head.weight[kept])

    def heads(self, tokens: Tensor, states: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, HEAD_DIM] of the positions from `first` on."""
        x = torch.cat([self.input_norm(tokens), self.hidden_norm(states)], dim=-1)
        size = HEADS * HEAD_DIM
        parts = self.qkv(x).split([size, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        return _rotated(q, first), _rotated(k, first), v

    def after(self, attended: Tensor, states: Tensor) -> Tensor:
        """The results [B, T, HIDDEN], which are the states of the next guess."""
        x = states + self.out(attended.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result

    def logits(self, results: Tensor) -> Tensor:
        """[N, DRAFT_VOCAB] of results [N, HIDDEN]."""
        logits: Tensor = self.lm_head(self.last_norm(results))
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their published names."""
        sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        q, k, v = torch.split(self.qkv.weight, sizes)
        layer = {
            "input_layernorm": self.input_norm.weight,
            "hidden_norm": self.hidden_norm.weight,
            "post_attention_layernorm": self.mlp_norm.weight,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": self.out.weight,
            "mlp.gate_proj": self.gate.weight,
            "mlp.up_proj": self.up.weight,
            "mlp.down_proj": self.down.weight,
        }
        others = {
            "fc": self.fc.weight,
            "norm": self.last_norm.weight,
            "lm_head": self.lm_head.weight,
        }
        named = others | {f"midlayer.{name}": value for name, value in layer.items()}
        return {f"{name}.weight": value.detach() for name, value in named.items()}


def _rotated(x: Tensor, first: int) -> Tensor:
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(first, first + x.shape[2])[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def loss(
    base: LlamaForCausalLM, head: Head, inputs: Tensor, targets: Tensor, rank: Tensor
) -> Tensor:
    """Summed cross-entropy of DEPTH guesses after each token; `rank` is the place of tokens in the draft vocabulary.

    Guess k after position t reads the model's states up to t and the head's own results from there on. It has to be
    the model's choice after the right tokens, where those belong to an answer.
    """
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run = base(inputs, output_hidden_states=True, use_cache=False)
        # The last entry is normed, and the head reads the sum before.
        raw = [*run.hidden_states[:-1], _LAST[0]]
        taken = torch.cat([raw[tap] for tap in TAPS], dim=-1)
        wanted = rank[run.logits.argmax(-1)].masked_fill(targets == IGNORE, IGNORE)
        embedded = base.model.embed_tokens(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        states = head.fc(taken)
        size = inputs.shape[1] - DEPTH
        causal = torch.full((size, size), -math.inf).triu(1)
        own: list[tuple[Tensor, Tensor]] = []
        first: tuple[Tensor, Tensor] | None = None
        total = torch.zeros(())
        states = states[:, :size]
        for guess in range(DEPTH):
            tokens = embedded[:, guess + 1 : guess + 1 + size]
            q, k, v = head.heads(tokens, states, guess)
            if first is None:
                first = k, v
            else:
                own.append((k, v))
            scores = [q @ first[0].transpose(2, 3) / HEAD_DIM**0.5 + causal]
            scores += [(q * key).sum(-1, keepdim=True) / HEAD_DIM**0.5 for key, _ in own]
            shares = torch.cat(scores, dim=-1).float().softmax(-1).to(v.dtype)
            attended = shares[..., :size] @ first[1]
            for number, (_, value) in enumerate(own):
                attended = attended + shares[..., size + number, None] * value
            states = head.after(attended, states)
            goal = wanted[:, guess + 1 : guess + 1 + size]
            chosen = goal != IGNORE
            total = total + functional.cross_entropy(
                head.logits(states[chosen]).float(), goal[chosen], reduction="sum"
            )
    return total


_LAST: list[Tensor] = [torch.empty(0)]
"""The residual stream before the last norm of the model's latest pass."""


def draft_vocabulary(samples: list[Sample], vocab_size: int) -> Tensor:
    """The most frequent tokens of answers, in order: [DRAFT_VOCAB]."""
    counts = Counter(
        int(token)
        for sample in samples
        for token, is_learned in zip(sample.ids, sample.learned, strict=True)
        if is_learned
    )
    frequent = sorted(range(vocab_size), key=lambda token: -counts[token])[:DRAFT_VOCAB]
    return torch.tensor(sorted(frequent))


def train(
    samples: list[Sample], *, steps: int, seed: int, checkpoint: Callable[[Head, Tensor], None]
) -> tuple[Head, Tensor]:
    """The head, and the tokens of its vocabulary [DRAFT_VOCAB], in order; `checkpoint` gets them now and then."""
    base = LlamaForCausalLM.from_pretrained(measure.MODEL, dtype=torch.float32).eval()
    base.set_attn_implementation("eager")
    base.model.norm.register_forward_pre_hook(lambda _, inputs: _LAST.__setitem__(0, inputs[0]))
    kept = draft_vocabulary(samples, base.config.vocab_size)
    rank = torch.full((base.config.vocab_size,), IGNORE)
    rank[kept] = torch.arange(DRAFT_VOCAB)
    torch.manual_seed(seed)
    head = Head(base, kept)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0
    )
    started = time.monotonic()
    for step, parts in enumerate(islice(batches(samples, seed), steps)):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        learned = DEPTH * sum(int((targets != IGNORE).sum()) for _, targets in parts)
        total = 0.0
        for inputs, targets in parts:
            if inputs.shape[1] <= DEPTH + 1:
                continue
            value = loss(base, head, inputs, targets, rank) / learned
            torch.autograd.backward(value)
            total += value.item()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            checkpoint(head, kept)
        if (step + 1) % 10 == 0:
            print(
                f"step {step + 1} loss {total:.4f} {time.monotonic() - started:.0f} s", flush=True
            )
    return head, kept


def save(head: Head, kept: Tensor, folder: Path, vocab_size: int) -> None:
    """Weights in bfloat16 and the config, as published heads have them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to(torch.bfloat16).contiguous() for name, value in head.tensors().items()
    }
    tensors["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.isin(torch.arange(vocab_size), kept)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train and save the head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=measure.SEED)
    parser.add_argument("--output", type=Path, default=HEAD)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(measure.MODEL / "tokenizer.json"))
    samples = encode(tokenizer, corpus.generate(arguments.seed, NUM_CONVERSATIONS).train)

    def checkpoint(head: Head, kept: Tensor) -> None:
        save(head, kept, arguments.output, tokenizer.get_vocab_size())

    checkpoint(*train(samples, steps=arguments.steps, seed=arguments.seed, checkpoint=checkpoint))


if __name__ == "__main__":
    main()
