"""Small tokenizers of the usual kinds, trained on the spot, and a model folder around one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from millrace_router.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs away",
    "hello world, hello there; what is deep learning?",
    "the cat sat on the mat. Don't stop now! 12345 67890",
    "你好，世界。今天天气很好。深度学习是什么？",
    "¿Dónde está la biblioteca? Größe, naïve café, œuvre",
    "Привет, мир! Как дела? 😀😃👩‍💻 🎉🎉",
) * 4


def byte_level() -> RustTokenizer:
    """As GPT-2, Llama 3, Qwen: bytes, merged to longer pieces."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def byte_fallback() -> RustTokenizer:
    """As Llama 2, Mistral, Gemma: words with a mark for the space before, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {word for line in CORPUS[:3] for word in line.split()}
    letters = {letter for line in CORPUS[:3] for letter in line} - {" "}
    texts = {f"▁{word}" for word in words} | letters | {"▁", "er", "ll", "▁▁", "你"}
    vocab = [(piece, 0.0) for piece in pieces] + [(text, -1.0) for text in sorted(texts)]
    rust = RustTokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    return rust


def metaspace() -> RustTokenizer:
    """As T5: Metaspace throughout."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def word_piece() -> RustTokenizer:
    """As BERT: a space goes before each piece but the ## ones and most punctuation."""
    rust = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=260, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """One of `KINDS`, ready to use."""
    return Tokenizer(KINDS[kind](), validation_workers=1)


def write_model(folder: Path, kind: str = "byte_level", **tokenizer_config: Any) -> Path:
    """Write a model folder without weights."""
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    config = {"model_type": "llama", "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
