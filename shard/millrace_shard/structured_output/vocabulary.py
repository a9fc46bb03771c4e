"""The vocabulary of the model as bytes, which grammars match.

It is read from tokenizer.json. The bytes of a token are those that it adds to the text anywhere but at its start, as in
the detokenizer of the router. The reader of llguidance supports byte-level and byte-fallback decoders only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from millrace_proto.small_files import MAX_TOKENIZER_BYTES, read_small_file
from millrace_proto.token_bytes import ByteDecoder
from millrace_shard.structured_output.closing import ClosingTokens
from millrace_shard.weights.checkpoint_files import TOKENIZER

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model for llguidance."""

    tokenizer: LLTokenizer
    """It has exactly as many tokens as the model has logits; ids without text have empty bytes."""
    size: int
    eos_token_ids: tuple[int, ...]
    """At least one; each of them ends a text and has no text itself."""
    closing: ClosingTokens

    @classmethod
    def of(
        cls, tokens: Sequence[bytes], *, special: Iterable[int], eos_token_ids: Sequence[int]
    ) -> Vocabulary:
        """A vocabulary from the bytes of each id, empty for ids without text; only their names allow `special` ids."""
        ends = tuple(eos_token_ids)
        named = sorted({*special, *ends})
        names = _Tokens(list(tokens), named, ends[0])
        tokenizer = LLTokenizer(TokenizerWrapper(names), eos_token=list(ends))
        closing = ClosingTokens.of(tokens, tokenizer, special=named, eos_token_id=ends[0])
        return cls(tokenizer, len(tokens), ends, closing)


def load_vocabulary(
    folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> Vocabulary | None:
    """The vocabulary of the model in `folder`, or None and a line in the log if it cannot match grammars.

    That is the case without a tokenizer.json, with tokens whose text depends on their neighbours (WordPiece), and
    without an end-of-sequence id. This takes half a second for 128 000 tokens.
    """
    ends = tuple(id_ for id_ in dict.fromkeys(eos_token_ids) if 0 <= id_ < vocab_size)
    try:
        if not ends:
            raise ValueError("the model has no end-of-sequence id")
        tokens, special = read_tokens(folder / TOKENIZER, vocab_size)
        return Vocabulary.of(tokens, special=special, eos_token_ids=ends)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("no grammars: %s", error)
        return None


class _Tokens:
    """A tokenizer for `TokenizerWrapper`."""

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Only grammars that force tokens call this, and `no_forcing` is set for all grammars."""
        raise NotImplementedError("grammars must not split text into tokens")


def read_tokens(path: Path, vocab_size: int) -> tuple[list[bytes], set[int]]:
    """The bytes of every id from the tokenizer.json at `path`, and the special ids. Raises NoFixedBytes."""
    description = json.loads(read_small_file(path, max_bytes=MAX_TOKENIZER_BYTES))
    decoder = ByteDecoder(description["decoder"])
    tokens = [b""] * vocab_size
    for id_, piece in _pieces(description["model"]):
        if id_ < vocab_size:
            tokens[id_] = decoder.decode(piece)
    special = set()
    for added in description.get("added_tokens") or ():
        if added["id"] < vocab_size:
            tokens[added["id"]] = added["content"].encode()
            if added["special"]:
                special.add(added["id"])
    return tokens, special


def _pieces(model: dict[str, Any]) -> list[tuple[int, str]]:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return [(id_, piece) for piece, id_ in vocab.items()]
    return [(id_, piece) for id_, (piece, _) in enumerate(vocab)]
