"""The vocabulary in the metadata of a GGUF file: tokens by id, their kinds, and the ids of special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.model_loader.gguf.metadata import Metadata

PREFIX = "tokenizer.ggml."
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
    )
)
"""Control tokens that end an answer: many files name only one of them, where generation_config.json has a list."""


class TokenKind(IntEnum):
    """The numbers in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens by id; each token occurs once."""

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    named: dict[str, int]
    """Ids of bos, eos, eot, eom, unknown and padding, as far as the file names them."""

    @classmethod
    def read(cls, metadata: Metadata, *, vocab_size: int) -> Vocabulary:
        """Raises WeightsError unless the tokens fit a model with embeddings of `vocab_size` ids."""
        tokens = metadata.texts(f"{PREFIX}tokens")
        if not tokens:
            raise UnsupportedModel(
                f"the file has no {PREFIX}tokens; name a model with the tokenizer: --tokenizer-name"
            )
        if len(tokens) > vocab_size:
            raise WeightsError(
                f"{PREFIX}tokens has {len(tokens)} tokens, and the model embeddings for {vocab_size}"
            )
        # Padding of a vocabulary may be empty strings; llama.cpp gives them these names.
        tokens = [token or f"[EMPTY_{id_}]" for id_, token in enumerate(tokens)]
        ids = {token: id_ for id_, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for id_, token in enumerate(tokens) if ids[token] != id_)
            raise WeightsError(f"{PREFIX}tokens has the token {twice!r} twice")
        kinds = metadata.counts(f"{PREFIX}token_type") or [TokenKind.NORMAL] * len(tokens)
        if len(kinds) != len(tokens):
            raise WeightsError(
                f"{PREFIX}token_type has {len(kinds)} kinds for {len(tokens)} tokens"
            )
        return cls(tokens=tokens, kinds=kinds, ids=ids, named=_named(metadata, len(tokens)))

    def of_kind(self, *kinds: TokenKind) -> list[int]:
        """The ids of all tokens of these kinds."""
        return [id_ for id_, kind in enumerate(self.kinds) if kind in kinds]

    def end_ids(self) -> list[int]:
        """The ids that end an answer: those that the file names, then control tokens with a known text."""
        named = [self.named[name] for name in ("eos", "eot", "eom") if name in self.named]
        control = self.of_kind(TokenKind.CONTROL)
        return list(dict.fromkeys(named + [id_ for id_ in control if self.tokens[id_] in ENDS]))

    def text(self, name: str) -> str | None:
        """The token that the file names `name`."""
        return self.tokens[self.named[name]] if name in self.named else None


def _named(metadata: Metadata, num_tokens: int) -> dict[str, int]:
    keys = {
        "bos": "bos",
        "eos": "eos",
        "eot": "eot",
        "eom": "eom",
        "unk": "unknown",
        "pad": "padding",
    }
    found = {}
    for name, word in keys.items():
        key = f"{PREFIX}{word}_token_id"
        id_ = metadata.count(key)
        if id_ is None:
            continue
        if id_ >= num_tokens:
            raise WeightsError(f"{key}={id_}, and the vocabulary has {num_tokens} tokens")
        found[name] = id_
    return found
