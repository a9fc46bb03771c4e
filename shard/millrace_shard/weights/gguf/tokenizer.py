"""The tokenizer in the metadata of a GGUF file, as the tokenizer.json and tokenizer_config.json of a model folder.

Of the patterns that split text into words, each splits the pieces that the patterns before it leave; matches and what
lies between them become pieces. The patterns are taken from the models' tokenizer.json files, in Oniguruma's syntax.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from tokenizers import Tokenizer

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.metadata import Metadata

PREFIX = "tokenizer.ggml."
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "</s>",
    )
)
"""Control tokens that end an answer: many files name only one of them, where generation_config.json has a list."""


SPARE = ("<unused", "<|reserved_special_token_")
"""Begin tokens that no text has."""
HARMONY, MESSAGE_END = frozenset(("<|return|>", "<|call|>")), "<|end|>"
"""The ends of an answer of gpt-oss, and the end of each of its messages."""


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

    def with_images(self, placeholder: str, *others: str) -> Vocabulary:
        """The same with these as control tokens, which some files mark otherwise.

        Files of Gemma 3 and LLaVA leave out the placeholder, whose embedding nothing reads; it takes the place of the
        last of the tokens that no text has, or of the byte 0.
        """
        tokens, kinds = [*self.tokens], [*self.kinds]
        spare = [id_ for id_, text in enumerate(tokens) if text.startswith(SPARE)]
        spare = spare or self.of_kind(TokenKind.BYTE)[:1]
        if placeholder not in self.ids and spare:
            tokens[spare[-1]] = placeholder
        ids = {text: id_ for id_, text in enumerate(tokens)}
        for text in (placeholder, *others):
            if text in ids:
                kinds[ids[text]] = TokenKind.CONTROL
        return replace(self, tokens=tokens, kinds=kinds, ids=ids)

    def of_kind(self, *kinds: TokenKind) -> list[int]:
        return [id_ for id_, kind in enumerate(self.kinds) if kind in kinds]

    def end_ids(self) -> list[int]:
        """The ids that end an answer: those that the file names, then control tokens with a known text."""
        named = [self.named[name] for name in ("eos", "eot", "eom") if name in self.named]
        texts = {self.tokens[id_]: id_ for id_ in self.of_kind(TokenKind.CONTROL)}
        ends = ENDS - {MESSAGE_END} if texts.keys() >= HARMONY else ENDS
        return list(dict.fromkeys(named + [id_ for text, id_ in texts.items() if text in ends]))

    def text(self, name: str) -> str | None:
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
    named = {}
    for name, word in keys.items():
        key = f"{PREFIX}{word}_token_id"
        id_ = metadata.count(key)
        if id_ is None:
            continue
        if id_ >= num_tokens:
            raise WeightsError(f"{key}={id_}, and the vocabulary has {num_tokens} tokens")
        named[name] = id_
    return named


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """The pattern of GPT-4's first tokenizer with numbers of `digits`."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contraction: str = "") -> str:
    """The pattern of GPT-4o's tokenizer, which begins a word at a capital letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """The split of one family of tokenizers, and other properties that the files do not hold."""

    patterns: tuple[str, ...]
    normal_form: bool = False
    """Whether text is brought into normal form C first."""
    whole_words: bool = False
    """Whether a word that is a token is not built by merges."""
    starts: bool = False
    """Whether a prompt begins with the bos token if the file does not say."""


_LLAMA3 = PreTokenizer(patterns=(_words(r"\p{N}{1,3}"),), whole_words=True, starts=True)
_DIGITS_THEN_GPT2 = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_QWEN2 = PreTokenizer(patterns=(_words(r"\p{N}"),), normal_form=True)
_GPT2_WORDS = PreTokenizer(patterns=(_GPT2,))
_GPT4O = PreTokenizer(patterns=(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))
_DEEPSEEK3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

PRE_TOKENIZERS = {
    "default": PreTokenizer(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "gpt-2": _GPT2_WORDS,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer(patterns=_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "qwen35": PreTokenizer(
        patterns=(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|{_SPACES}",
        ),
        normal_form=True,
    ),
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "deepseek-coder": PreTokenizer(
        patterns=(
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
            r"\p{N}",
        )
    ),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "tekken": PreTokenizer(patterns=(_cased_words(r"\p{N}"),), whole_words=True, starts=True),
    "gpt-4o": _GPT4O,
    **dict.fromkeys(("phi-2", "olmo", "exaone4"), _GPT2_WORDS),
    **dict.fromkeys(("dbrx", "chatglm-bpe"), PreTokenizer(patterns=_LLAMA3.patterns)),
    "glm4": PreTokenizer(patterns=_LLAMA3.patterns, whole_words=True),
    "command-r": PreTokenizer(patterns=_DIGITS_THEN_GPT2.patterns, normal_form=True),
    "hunyuan": PreTokenizer(patterns=_QWEN2.patterns),
    "seed-coder": PreTokenizer(
        patterns=(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
        )
    ),
}


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


TEMPLATE = "tokenizer.chat_template"
REMEDY = "name a model with the right tokenizer: --tokenizer-name"


def tokenizer_json(metadata: Metadata, vocabulary: Vocabulary) -> str:
    """The text of a tokenizer.json. Raises UnsupportedModel for other kinds, and WeightsError for damaged ones."""
    kind = metadata.text(f"{PREFIX}model")
    if kind == "gpt2":
        starts, parts = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        starts, parts = True, sentencepiece_model(metadata, vocabulary)
    else:
        raise UnsupportedModel(
            f"{PREFIX}model={kind!r} is not supported, gpt2 and llama are; {REMEDY}"
        )
    text = json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(vocabulary),
            **parts,
            "post_processor": _ends(metadata, vocabulary, starts=starts),
        },
        ensure_ascii=False,
    )
    try:
        Tokenizer.from_str(text)
    except Exception as error:
        # The library raises plain exceptions.
        raise WeightsError(f"the file's tokenizer is damaged: {error}; {REMEDY}") from error
    return text


def tokenizer_config(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The object of a tokenizer_config.json: special tokens and chat templates."""
    texts = {f"{name}_token": vocabulary.text(name) for name in ("bos", "eos", "unk", "pad")}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in texts.items() if text is not None},
    }
    templates = {"default": metadata.text(TEMPLATE)}
    for name in metadata.texts("tokenizer.chat_templates") or ():
        templates[name] = metadata.text(f"{TEMPLATE}.{name}")
    special = [{"name": name, "template": text} for name, text in templates.items() if text]
    if special:
        single = len(special) == 1 and special[0]["name"] == "default"
        config["chat_template"] = special[0]["template"] if single else special
    return config


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> tuple[bool, dict[str, Any]]:
    """Whether prompts begin with bos, and the parts of a byte-level tokenizer.json."""
    pre = _pre_tokenizer(metadata)
    merges = metadata.texts(f"{PREFIX}merges")
    if merges is None:
        raise WeightsError(f"the file has no {PREFIX}merges; {REMEDY}")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": metadata.flag(f"{PREFIX}add_space_prefix") or False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return pre.starts, {
        "normalizer": {"type": "NFC"} if pre.normal_form else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        "decoder": {**to_bytes, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocabulary.ids,
            "merges": [_pair(merge) for merge in merges],
        },
    }


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text(f"{PREFIX}pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{PREFIX}pre={name!r} is not supported, these are: {', '.join(PRE_TOKENIZERS)}; {REMEDY}"
        )
    return PRE_TOKENIZERS[name]


def _pair(merge: str) -> tuple[str, str]:
    # A token may begin with a space.
    left, _, right = merge[1:].partition(" ")
    if not right:
        raise WeightsError(f"{PREFIX}merges has {merge!r}, which is not a pair; {REMEDY}")
    return merge[:1] + left, right


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are recognised in a text before it is split into words."""
    kinds = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
    return [
        {
            "id": id_,
            "content": vocabulary.tokens[id_],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.kinds[id_] != TokenKind.USER_DEFINED,
        }
        for id_ in vocabulary.of_kind(*kinds)
    ]


def _ends(metadata: Metadata, vocabulary: Vocabulary, *, starts: bool) -> dict[str, Any] | None:
    """The post-processor, which adds the bos and eos tokens that the file requests."""
    flags = {
        "bos": metadata.flag(f"{PREFIX}add_bos_token"),
        "eos": metadata.flag(f"{PREFIX}add_eos_token"),
    }
    if flags["bos"] is None:
        flags["bos"] = starts and "bos" in vocabulary.named
    for name, added in flags.items():
        if added and name not in vocabulary.named:
            raise WeightsError(
                f"{PREFIX}add_{name}_token is set, and the file has no {PREFIX}{name}_token_id"
            )
    if not any(flags.values()):
        return None
    special = [
        {"SpecialToken": {"id": vocabulary.text(name), "type_id": 0}}
        for name, added in flags.items()
        if added
    ]
    position = 1 if flags["bos"] else 0

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        return [
            *special[:position],
            {"Sequence": {"id": sequence, "type_id": type_id}},
            *special[position:],
        ]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]}
            for text in (vocabulary.text(name) for name, added in flags.items() if added)
            if text is not None
        },
    }
