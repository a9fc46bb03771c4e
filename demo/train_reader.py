"""Trains a small SmolVLM that reads numbers and short words: `python -m demo.train_reader --output demo/reader`."""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from demo import pictures
from demo.train import IGNORE, REPORT_STEPS, Clock, rate
from millrace_router.images.geometry import AROUND, GLOBAL, IMAGE, Geometry, expansion

READER = Path(__file__).parent / "reader"
SEED = 20
CONTEXT = 1024
TILE, PATCH, SHUFFLE = 60, 12, 1
SIDE = TILE // PATCH
"""Patches a side."""
ROWS_PER_TILE = (SIDE // SHUFFLE) ** 2
BATCH = 64
"""Pictures."""
RATE_SCALE = 0.6
"""The learning rate, as a multiple of the demo model's."""
HELPED_UNTIL = 0.45
"""Up to this progress the encoder is also told which character each patch shows."""
PAIRS_FROM = 0.4
"""From this progress on a quarter of the batches has two pictures in each conversation."""
SHARE_OF_PAIRS = 0.25
LONGEST_FROM = 0.2
"""From this progress on texts have any length; they are short at first."""
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
SPECIAL = (BOS, END, PAD, USER, ASSISTANT, IMAGE, AROUND, GLOBAL)
TURN = f"{USER}{expansion(0, 0, ROWS_PER_TILE)}{END}{ASSISTANT}"
"""The tokens of a picture, and the beginning of the answer."""
ALPHABET = string.ascii_lowercase + string.digits
PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"longest_edge": TILE},
    "max_image_size": {"longest_edge": TILE},
}
# The model knows pictures and its answers to them: everything else is left out.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% set before = [] if loop.first else loop.previtem['content'] or [] %}"
    "{% if message['content'] is string and message['content'] and before is not string"
    " and 'image' in before | map(attribute='type') | list %}"
    "{{ '<|assistant|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% elif message['content'] is not string and message['content'] %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|user|><image><|end|>' }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Batch(NamedTuple):
    """Conversations of the same number of pictures."""

    pixels: Tensor
    """uint8 [conversations, pictures, 3, TILE, TILE]."""
    ids: Tensor
    """int64 [conversations, tokens]."""
    targets: Tensor
    """int64 [conversations, tokens]: `ids` where the model learns them, else IGNORE."""
    characters: Tensor
    """int64 [pictures, patches]: the token of the character in each patch's column."""


def main() -> None:
    """Train, save and measure."""
    arguments = _arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    tokenizer = new_tokenizer()
    if arguments.start is None:
        model = SmolVLMForConditionalGeneration(configuration(tokenizer))
    else:
        kind = SmolVLMForConditionalGeneration
        model = kind.from_pretrained(arguments.start, dtype=torch.float32)
    model.set_attn_implementation("eager")
    print(f"{sum(each.numel() for each in model.parameters())} weights", flush=True)
    clock = Clock(arguments.steps, time.monotonic(), 60 * arguments.minutes)
    train(model, tokenizer, clock, arguments)
    save(model, tokenizer, arguments.output)
    share = measure(model.float().eval(), tokenizer, arguments.seed)
    print(f"{share:.1%} of the characters of texts that were kept back are right", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, default=READER)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--minutes", type=float, default=30, help="finish in fewer steps if time runs short"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--start", type=Path, help="a folder of this command, to go on from")
    parser.add_argument("--progress", type=float, default=0.0, help="of the training to go on from")
    return parser.parse_args()


def new_tokenizer() -> Tokenizer:
    """A token for each byte, so that each letter is read by itself."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    )
    return tokenizer


def configuration(tokenizer: Tokenizer) -> SmolVLMConfig:
    """An encoder and a language model of about a million weights each, whose heads two shards can split."""
    special = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    common = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6}
    text = {
        **common,
        **special,
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
    }
    vision = {**common, "num_hidden_layers": 3, "image_size": TILE, "patch_size": PATCH}
    return SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=SHUFFLE,
        image_token_id=tokenizer.token_to_id(IMAGE),
        tie_word_embeddings=True,
        **special,
    )


def pixels_of(image: Image.Image) -> NDArray[np.uint8]:
    """Prepare a picture as the router does: [3, TILE, TILE]."""
    layout = Geometry.of("smolvlm", PROCESSOR).layout(image.height, image.width)
    for height, width in layout.resized:
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(image).transpose(2, 0, 1)


def batch_of(tokenizer: Tokenizer, rng: random.Random, *, longest: int, num_pictures: int) -> Batch:
    shown = [
        [
            pictures.random_picture(rng, is_for_tests=False, longest=longest)
            for _ in range(num_pictures)
        ]
        for _ in range(BATCH // num_pictures)
    ]
    pixels = np.stack([[pixels_of(each.image) for each in one] for one in shown])
    ids_of = {
        text: tokenizer.encode(text, add_special_tokens=False).ids
        for text in (BOS, TURN, END, PAD, *ALPHABET, *(each.text for one in shown for each in one))
    }
    rows, learned = [], []
    for one in shown:
        row, mask = list(ids_of[BOS]), [False]
        for each in one:
            answer = ids_of[each.text] + ids_of[END]
            row += ids_of[TURN] + answer
            mask += [False] * len(ids_of[TURN]) + [True] * len(answer)
        rows.append(row)
        learned.append(mask)
    width = max(map(len, rows))
    ids = torch.tensor([row + ids_of[PAD] * (width - len(row)) for row in rows])
    is_learned = torch.tensor([each + [False] * (width - len(each)) for each in learned])
    targets = torch.where(is_learned, ids, IGNORE)
    columns = [
        [ids_of[each.character_at((column + 0.5) / SIDE)][0] for column in range(SIDE)]
        for one in shown
        for each in one
    ]
    return Batch(torch.from_numpy(pixels), ids, targets, torch.tensor(columns).repeat(1, SIDE))


def train(
    model: SmolVLMForConditionalGeneration,
    tokenizer: Tokenizer,
    clock: Clock,
    arguments: argparse.Namespace,
) -> None:
    """AdamW with a cosine schedule, in bfloat16 where it is safe."""
    guess = torch.nn.Linear(model.config.vision_config.hidden_size, tokenizer.get_vocab_size())
    seen: list[Tensor] = []
    connector = model.model.connector
    hook = connector.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    weights = [*model.parameters(), *guess.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.98), weight_decay=0.02, fused=True)
    rng = random.Random(f"{arguments.seed} {arguments.progress}")
    model.train()
    total, patches, right, count = 0.0, 0.0, 0, 0
    for step in range(clock.steps):
        before = arguments.progress
        progress = before + (1 - before) * clock.progress(step)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = RATE_SCALE * rate(step, progress)
        growth = (pictures.LONGEST + 1 - pictures.SHORTEST) * progress / LONGEST_FROM
        longest = min(pictures.LONGEST, pictures.SHORTEST + int(growth))
        has_pairs = progress > PAIRS_FROM and rng.random() < SHARE_OF_PAIRS
        batch = batch_of(tokenizer, rng, longest=longest, num_pictures=1 + has_pairs)
        logits, wanted = predicted(model, batch)
        loss = functional.cross_entropy(logits, wanted)
        help_ = max(0.0, 1 - progress / HELPED_UNTIL)
        guessed = guess(seen.pop().float()).flatten(0, 1)
        told = functional.cross_entropy(guessed, batch.characters.flatten())
        torch.autograd.backward(loss + help_ * told)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        patches += told.item()
        right += int((logits.argmax(-1) == wanted).sum())
        count += len(wanted)
        if (step + 1) % REPORT_STEPS == 0:
            seconds = time.monotonic() - clock.started
            print(
                f"step {step + 1} length {longest} loss {total / REPORT_STEPS:.4f}"
                f" of patches {patches / REPORT_STEPS:.4f} right {right / count:.3f} {seconds:.0f} s",
                flush=True,
            )
            total, patches, right, count = 0.0, 0.0, 0, 0
    hook.remove()


def predicted(model: SmolVLMForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return float32 logits [learned tokens, vocabulary] and the tokens that they should predict."""
    targets = batch.targets[:, 1:]
    is_learned = targets != IGNORE
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch.ids[:, :-1],
            pixel_values=batch.pixels.float() / 127.5 - 1,
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[is_learned])
    return logits.float(), targets[is_learned]


def measure(
    model: SmolVLMForConditionalGeneration, tokenizer: Tokenizer, seed: int, count: int = 300
) -> float:
    """Return the share of right characters, of texts that the model was not trained with."""
    rng = random.Random(seed)
    shown = [pictures.random_picture(rng, is_for_tests=True) for _ in range(count)]
    ids = tokenizer.encode(BOS + TURN, add_special_tokens=False).ids
    pixels = torch.from_numpy(np.stack([pixels_of(each.image) for each in shown]))
    with torch.inference_mode():
        answers = model.generate(
            input_ids=torch.tensor([ids] * count),
            pixel_values=pixels[:, None].float() / 127.5 - 1,
            max_new_tokens=pictures.LONGEST + 4,
            do_sample=False,
        )
    texts = tokenizer.decode_batch(answers[:, len(ids) :].tolist())
    wrong = sum(
        pictures.num_wrong(text, each.text) for text, each in zip(texts, shown, strict=True)
    )
    return 1 - wrong / sum(len(each.text) for each in shown)


def save(model: SmolVLMForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights in bfloat16, and the files that servers read."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of the tokenizer, with the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder, save_jinja_files=False)


if __name__ == "__main__":
    main()
