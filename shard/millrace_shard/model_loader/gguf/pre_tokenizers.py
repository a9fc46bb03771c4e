"""How byte-level tokenizers split text into words, by the names in `tokenizer.ggml.pre`.

Each pattern splits the pieces that the patterns before it leave; matches and what lies between them become pieces. The
patterns are those of the models' tokenizer.json files, in Oniguruma's syntax.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    "deepseek-v3": PreTokenizer(
        patterns=(
            r"\p{N}{1,3}",
            r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "tekken": PreTokenizer(patterns=(_cased_words(r"\p{N}"),), whole_words=True, starts=True),
    "gpt-4o": _GPT4O,
}
