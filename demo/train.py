"""Trains the demo model from a seed: `python -m demo.train --output demo/model`."""

from __future__ import annotations

import argparse
import math
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo import corpus, measure, vocabulary

CONTEXT = 1024
BATCH = 72
PART_TOKENS = 2048
WINDOW = 8192
PEAK_RATE = 1.8e-3
FINAL_RATE = 2e-5
WARMUP_STEPS = 100
IGNORE = -100
REPORT_STEPS = 50
CHECKPOINT_STEPS = 200


@dataclass(frozen=True)
class Sample:
    """Token ids of a conversation and, for each, whether the model learns to write it."""

    ids: array[int]
    learned: array[int]


@dataclass(frozen=True)
class Clock:
    """The progress of training, by steps or by time."""

    steps: int
    started: float
    seconds: float

    def progress(self, step: int) -> float:
        """The progress from 0 to 1."""
        return max(step / self.steps, (time.monotonic() - self.started) / self.seconds)


def main() -> None:
    """Make the corpus, train tokenizer and model, save both."""
    arguments = _arguments()
    started = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    conversations = corpus.generate(arguments.seed).train
    tokenizer = vocabulary.train(
        text
        for item in conversations[:40_000]
        for turn in item.turns
        for text in (turn.question, turn.answer)
    )
    samples = encode(tokenizer, conversations)
    model = LlamaForCausalLM(configuration(tokenizer))
    # For texts this short the fused attention's backward pass takes half the time on CPU.
    model.set_attn_implementation("eager")
    weights = sum(parameter.numel() for parameter in model.parameters())
    tokens = sum(len(sample.ids) for sample in samples)
    print(f"{weights} weights, {len(samples)} conversations, {tokens} tokens", flush=True)
    clock = Clock(arguments.steps, started, 60 * arguments.minutes)
    train(model, samples, clock, arguments.seed, lambda: save(model, tokenizer, arguments.output))
    save(model, tokenizer, arguments.output)
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=measure.SEED)
    parser.add_argument("--output", type=Path, default=measure.MODEL)
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument(
        "--minutes", type=float, default=90, help="finish in fewer steps if time runs short"
    )
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def configuration(tokenizer: Tokenizer) -> LlamaConfig:
    """A small model with even numbers of heads, so that two shards can split it."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(vocabulary.BOS),
        eos_token_id=tokenizer.token_to_id(vocabulary.END),
        pad_token_id=tokenizer.token_to_id(vocabulary.PAD),
    )


def encode(tokenizer: Tokenizer, conversations: Sequence[corpus.Conversation]) -> list[Sample]:
    """Token ids of all conversations; each piece is encoded alone, as prompts are when serving."""
    samples = []
    for start in range(0, len(conversations), WINDOW):
        pieces = [vocabulary.segments(item) for item in conversations[start : start + WINDOW]]
        texts = [text for item in pieces for text, _ in item]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for item in pieces:
            ids, learned = array("H"), array("b")
            for _, learn in item:
                part = next(encoded).ids
                ids.extend(part)
                learned.extend([learn] * len(part))
            samples.append(Sample(ids[:CONTEXT], learned[:CONTEXT]))
    return samples


Part = tuple[torch.Tensor, torch.Tensor]


def batches(samples: Sequence[Sample], seed: int) -> Iterator[list[Part]]:
    """Endless batches, each a random mix; its parts hold conversations of like length."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(range(len(samples)), len(samples))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = [samples[index] for index in order[start : start + BATCH]]
            chosen.sort(key=lambda sample: len(sample.ids))
            yield [_tensors(group) for group in _groups(chosen)]


def _groups(chosen: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Cut samples, sorted by length, so that no part has more tokens than allowed."""
    group: list[Sample] = []
    for sample in chosen:
        if group and (len(group) + 1) * len(sample.ids) > PART_TOKENS:
            yield group
            group = []
        group.append(sample)
    yield group


def _tensors(group: Sequence[Sample]) -> Part:
    """Pad on the right, which causal attention does not read."""
    width = max(len(sample.ids) for sample in group) - 1
    inputs = torch.zeros(len(group), width, dtype=torch.long)
    targets = torch.full((len(group), width), IGNORE)
    for row, sample in enumerate(group):
        size = len(sample.ids) - 1
        ids = torch.tensor(sample.ids, dtype=torch.long)
        learned = torch.tensor(sample.learned, dtype=torch.bool)
        inputs[row, :size] = ids[:-1]
        targets[row, :size] = torch.where(learned[1:], ids[1:], IGNORE)
    return inputs, targets


def train(
    model: LlamaForCausalLM,
    samples: Sequence[Sample],
    clock: Clock,
    seed: int,
    checkpoint: Callable[[], None],
) -> None:
    """AdamW with a cosine schedule, in bfloat16 where it is safe."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    model.train()
    seen, total, started = 0, 0.0, time.monotonic()
    for step, parts in enumerate(batches(samples, seed)):
        progress = clock.progress(step)
        if progress >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = rate(step, progress)
        learned = sum(int((targets != IGNORE).sum()) for _, targets in parts)
        for inputs, targets in parts:
            value = loss(model, inputs, targets) / learned
            torch.autograd.backward(value)
            seen += inputs.numel()
            total += value.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % REPORT_STEPS == 0:
            speed = seen / (time.monotonic() - started)
            print(f"step {step + 1} loss {total / REPORT_STEPS:.4f} {speed:.0f} tok/s", flush=True)
            total = 0.0
        if (step + 1) % CHECKPOINT_STEPS == 0:
            checkpoint()


def rate(step: int, progress: float) -> float:
    """The learning rate: a short linear rise, then a cosine down."""
    rise = min(1.0, (step + 1) / WARMUP_STEPS)
    return rise * (FINAL_RATE + (PEAK_RATE - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def loss(model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of learned tokens; only their positions reach the vocabulary head."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(inputs, use_cache=False).last_hidden_state
        chosen = targets != IGNORE
        logits = model.lm_head(hidden[chosen])
    return functional.cross_entropy(logits.float(), targets[chosen], reduction="sum")


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights in bfloat16, configuration and tokenizer, as `from_pretrained` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = LlamaForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.config.dtype = "bfloat16"
    rounded.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    rounded.save_pretrained(folder)
    vocabulary.save(tokenizer, folder, CONTEXT)


if __name__ == "__main__":
    main()
