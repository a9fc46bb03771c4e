"""Small tokenizers of the usual kinds, trained when they are needed, and a model folder with one."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.errors import RouterError
from millrace_router.request.entry import Entry, new_entry
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.text.tokenizer import Tokenizer

CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs away",
    "hello world, hello there; what is deep learning?",
    "the cat sat on the mat. Don't stop now! 12345 67890",
    "你好，世界。今天天气很好。深度学习是什么？",  # noqa: RUF001
    "¿Dónde está la biblioteca? Größe, naïve café, œuvre",
    "Привет, мир! Как дела? 😀😃👩‍💻 🎉🎉",
) * 4


def byte_level() -> RustTokenizer:
    """A tokenizer as in GPT-2, Llama 3, Qwen: bytes, merged to longer pieces."""
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
    """A tokenizer as in Llama 2, Mistral, Gemma: words with a mark for the space, unknown characters as bytes."""
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
    """A tokenizer as in T5: Metaspace throughout."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def word_piece() -> RustTokenizer:
    """A tokenizer as in BERT: a space precedes each piece except the ## ones and most punctuation."""
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


Plan = Sequence[int | RouterError]
"""Token ids of a generation, or an error in the place of one."""


class Generations:
    """A script for the edge's fake batcher: generates planned ids through real entries, one each turn of the loop.

    If a plan ends before its generation, the stream stays open until it is closed.
    """

    def __init__(
        self, *plans: Plan, tokenizer: Tokenizer, eos_token_id: int = 0, together: int = 1
    ) -> None:
        """With `together`, tokens begin once that many requests have arrived."""
        self._together = asyncio.Barrier(together)
        self.requests: list[ValidRequest] = []
        self.streams: list[TokenStream] = []
        self.candidates: list[tuple[int, float]] = []
        self.cached_tokens: int | None = None
        self._plans = iter(plans)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset({eos_token_id})
        self._ids = count()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, request: ValidRequest, stream: TokenStream) -> None:
        """Begin the next plan."""
        self.requests.append(request)
        self.streams.append(stream)
        entry = new_entry(self._ids, self._tokenizer, self._eos_token_ids, request, block_size=16)
        entry.stream = stream
        plan = next(self._plans)
        if entry.resume():
            return
        task = asyncio.create_task(self._feed(entry, plan[entry.num_generated :]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, entry: Entry, plan: Plan) -> None:
        stream = entry.stream
        if stream.batched_at is None:
            stream.batched_at, stream.cached_tokens = stream.queued_at, self.cached_tokens
        await self._together.wait()
        for item in plan:
            await asyncio.sleep(0)
            if stream.closed:
                return
            if isinstance(item, RouterError):
                stream.fail(item)
                return
            try:
                entry.record(item, -0.5)
            except RouterError as error:
                stream.fail(error)
                return
            if entry.request.choice is not None:
                entry.request.choice.flush()
            if entry.accept(item, -0.5, self.candidates[: entry.request.top_n_tokens]):
                return


def saying(*texts: str, using: Tokenizer | None = None, end: Sequence[int] = (0,)) -> Generations:
    """A script that says each text to one request after the other, and ends; its tokens are `byte_level` by default."""
    words = using or tokenizer("byte_level")
    return Generations(*([*words.encode(text), *end] for text in texts), tokenizer=words)
