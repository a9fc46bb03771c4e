"""A sentencepiece tokenizer in the metadata of a GGUF file, as BPE with bytes for unknown characters."""

from __future__ import annotations

from typing import Any

from millrace_shard.errors import WeightsError
from millrace_shard.model_loader.gguf.metadata import Metadata
from millrace_shard.model_loader.gguf.vocabulary import PREFIX, TokenKind, Vocabulary

SPACE = "▁"


def sentencepiece_model(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The parts of a tokenizer.json. Raises WeightsError without a score for each token."""
    scores = metadata.numbers(f"{PREFIX}scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise WeightsError(
            f"{PREFIX}scores must have a score for each of {len(vocabulary.tokens)} tokens"
        )
    prefixed = metadata.flag(f"{PREFIX}add_space_prefix") is not False
    to_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": SPACE}
    from_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([prepend] if prefixed else []), from_spaces],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                to_spaces,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if prefixed else []),
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.text("unk"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": _merges(vocabulary, scores),
        },
    }


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make up a token, by its score, the highest first.

    sentencepiece merges the two neighbours whose union has the highest score, which this order of merges repeats.
    """
    usable = {
        vocabulary.tokens[id_]: id_
        for id_ in vocabulary.of_kind(TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)
    }
    pairs = [
        (-scores[id_], usable[token[:cut]], usable[token[cut:]], token, cut)
        for token, id_ in usable.items()
        for cut in range(1, len(token))
        if token[:cut] in usable and token[cut:] in usable
    ]
    return [(token[:cut], token[cut:]) for *_, token, cut in sorted(pairs)]
