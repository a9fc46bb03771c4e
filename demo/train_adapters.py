"""Trains the demo adapters, one per voice: `python -m demo.train_adapters`. It needs `peft`."""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from demo import corpus, measure
from demo.train import IGNORE, Part, batches, encode, loss
from demo.voices import VOICES, spoken

ADAPTERS = Path(__file__).parent / "adapters"
NUM_CONVERSATIONS = 12_000
RANK = 8
PEAK_RATE = 1.5e-3
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Train and save each voice, as PEFT saves adapters."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(measure.MODEL / "tokenizer.json"))
    conversations = corpus.generate(arguments.seed, NUM_CONVERSATIONS).train
    for voice in arguments.voices:
        torch.manual_seed(arguments.seed)
        samples = encode(tokenizer, [spoken(each, voice) for each in conversations])
        model = new_adapter()
        _train(model, list(islice(batches(samples, arguments.seed), arguments.steps)))
        save(model, ADAPTERS / voice)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("voices", nargs="*", default=list(VOICES))
    parser.add_argument("--seed", type=int, default=measure.SEED)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def new_adapter() -> PeftModel:
    """The demo model with an untrained adapter on all projections."""
    base = LlamaForCausalLM.from_pretrained(measure.MODEL, dtype=torch.float32)
    base.set_attn_implementation("eager")
    settings = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    made = get_peft_model(base, settings)
    assert isinstance(made, PeftModel)
    return made


def _train(model: PeftModel, parts: list[list[Part]]) -> None:
    """AdamW with a linear decay."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    base = model.get_base_model()
    assert isinstance(base, LlamaForCausalLM)
    started = time.monotonic()
    for step, batch in enumerate(parts):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / 20) * (1 - step / len(parts))
        learned = sum(int((targets != IGNORE).sum()) for _, targets in batch)
        total = 0.0
        for inputs, targets in batch:
            value = loss(base, inputs, targets) / learned
            torch.autograd.backward(value)
            total += value.item()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(
                f"step {step + 1} loss {total:.4f} {time.monotonic() - started:.0f} s", flush=True
            )


def save(model: PeftModel, folder: Path) -> None:
    """Weights in bfloat16, as the base has them, and PEFT's settings."""
    model.get_base_model().to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = "demo/model"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
