"""Asks the demo model held-back questions and counts exact answers: `python -m demo.measure`."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from demo import corpus, vocabulary
from demo.corpus import Conversation

SEED = 1
MODEL = Path(__file__).parent / "model"
MAX_NEW_TOKENS = 120


@dataclass(frozen=True)
class Reply:
    """The model's text, and whether it ended by itself."""

    text: str
    ended: bool


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model in float32 and tokenizer from a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    batch: int = 64,
) -> list[Reply]:
    """Greedy answers to prompts that already carry their special tokens."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    replies: dict[int, Reply] = {}
    for start in range(0, len(prompts), batch):
        chosen = by_length[start : start + batch]
        encoded = tokenizer(
            [prompts[index] for index in chosen],
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_token_type_ids=False,
        )
        with torch.inference_mode():
            rows = model.generate(**encoded, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        width = encoded["input_ids"].shape[1]
        for index, row in zip(chosen, rows, strict=True):
            answer = row[width:]
            ended = bool((answer == model.generation_config.eos_token_id).any())
            replies[index] = Reply(tokenizer.decode(answer, skip_special_tokens=True), ended)
    return [replies[index] for index in range(len(prompts))]


def is_exact(conversation: Conversation, reply: Reply) -> bool:
    """Whether the reply is the last turn's answer, letter for letter, and nothing more."""
    lead = "\n" if conversation.style == "raw" else ""
    return reply.ended and reply.text == lead + conversation.turns[-1].answer


def sample(held_back: Sequence[Conversation], count: int, seed: int = 0) -> list[Conversation]:
    """A fixed choice of about `count` in which each category has its share, but at least eight."""
    groups: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in held_back:
        groups[conversation.category].append(conversation)
    rng = random.Random(seed)
    chosen: list[Conversation] = []
    for group in groups.values():
        share = max(8, round(count * len(group) / len(held_back)))
        chosen += rng.sample(group, min(share, len(group)))
    return chosen


def main() -> None:
    """Print the rate of each category and, if asked, the wrong answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--wrong", action="store_true", help="show the wrong answers")
    arguments = parser.parse_args()
    held_back = corpus.generate(arguments.seed, size=0).held_back
    model, tokenizer = load(arguments.model)
    replies = ask(model, tokenizer, [vocabulary.prompt(item) for item in held_back])
    results: dict[str, list[bool]] = defaultdict(list)
    for item, reply in zip(held_back, replies, strict=True):
        exact = is_exact(item, reply)
        results[item.category].append(exact)
        if arguments.wrong and not exact:
            print(f"{item.style} {item.turns[-1].question!r}\n    {reply.text!r} {reply.ended}")
    for category, outcomes in results.items():
        print(f"{category:<12} {sum(outcomes):>5} of {len(outcomes):>5}  {_rate(outcomes):6.1%}")
    everything = [exact for outcomes in results.values() for exact in outcomes]
    print(f"{'all':<12} {sum(everything):>5} of {len(everything):>5}  {_rate(everything):6.1%}")


def _rate(outcomes: Sequence[bool]) -> float:
    return sum(outcomes) / len(outcomes)


if __name__ == "__main__":
    main()
