"""The demo model's tokenizer: trained on the corpus, saved with its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo.corpus import Conversation

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, END, PAD, SYSTEM, USER, ASSISTANT)
SIZE = 2048

# Roles of other APIs are mapped onto the three that the model knows.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% elif message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ (message['content'] | trim) + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE in which every digit is a separate token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        min_frequency=2,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the files that `transformers` and servers read."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder, save_jinja_files=False)
    # The class name that every version of transformers knows.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def segments(conversation: Conversation) -> list[tuple[str, bool]]:
    """The pieces of a conversation, and whether the model learns to write each of them."""
    if conversation.style == "raw":
        (turn,) = conversation.turns
        return [(BOS + turn.question, False), ("\n" + turn.answer + END, True)]
    opening = f"{SYSTEM}{conversation.system}{END}" if conversation.system else ""
    pieces = [(BOS + opening, False)]
    for turn in conversation.turns:
        pieces.append((f"{USER}{turn.question}{END}{ASSISTANT}", False))
        pieces.append((turn.answer + END, True))
    return pieces


def prompt(conversation: Conversation) -> str:
    """Everything before the last answer, special tokens included."""
    return "".join(text for text, _ in segments(conversation)[:-1])
